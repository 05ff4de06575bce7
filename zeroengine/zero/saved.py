"""Tensors that autograd saves and that lie in gathered values: saved as references, so that the values may go until backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zeroengine.errors import ReleasedParameterError
from zeroengine.offload.saved import SavedOther
from zeroengine.zero.bucket import Bucket


@dataclass(frozen=True)
class SavedSlice:
    """A saved tensor that lies in a bucket: where, and which values it had."""

    bucket: Bucket
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    version: tuple[int, int]


class Pack:
    """Hook on a tensor that autograd saves: a reference into a bucket, or what `other` makes of it."""

    __slots__ = ("owner", "_bucket_of", "_other")

    def __init__(self, owner: object, bucket_of: Callable[[Tensor], Bucket | None], other: Callable[[Tensor], Any]) -> None:
        self.owner = owner
        self._bucket_of = bucket_of
        self._other = other

    def __call__(self, t: Tensor) -> Any:
        bucket = self._bucket_of(t)
        if bucket is None or t.dtype is not bucket.dtype or t.is_conj() or t.is_neg():
            return self._other(t)
        offset = int(t.storage_offset())
        return SavedSlice(bucket, offset, t.shape, t.stride(), bucket.version_of(offset))


class SavedValues:
    """Knows in which bucket's gathered values a tensor lies, and lets autograd save such tensors as `SavedSlice`s. `buckets`: how
    many there are."""

    def __init__(self, buckets: int) -> None:
        self._many = 2 * buckets + 16  # entries, from which those of memory that is gone are left out
        self._by_storage: dict[int, tuple[Bucket, StorageWeakRef]] = {}

    def remember(self, bucket: Bucket) -> None:
        """The values of `bucket` are whole now."""
        if bucket.full is None:
            return
        storage = bucket.full.untyped_storage()
        if len(self._by_storage) > self._many:
            self._by_storage = {k: v for k, v in self._by_storage.items() if not v[1].expired()}
        self._by_storage[_storage_of(bucket.full)] = (bucket, StorageWeakRef(storage))

    def forget(self) -> None:
        self._by_storage.clear()

    def bucket_of(self, t: Tensor) -> Bucket | None:
        """The bucket in whose gathered values `t` lies, also one that was released since: as long as the memory lives
        it holds them."""
        found = self._by_storage.get(_storage_of(t))
        return None if found is None or found[1].expired() else found[0]

    def saving(self, bring: Callable[[Bucket], None]) -> contextlib.AbstractContextManager[None]:
        """Context in which tensors that autograd saves and that lie in a bucket are saved as `SavedSlice`s. `bring` makes the values
        of a bucket whole again when backward reads them."""
        # Only the innermost pair of hooks is called, so what is not ours goes on to the pair that was innermost before.
        outer = _top_hooks()
        unpack_other: Callable[[Any], Tensor] = outer[1] if outer else SavedOther.unpack

        def unpack(packed: Any) -> Tensor:
            if type(packed) is SavedSlice:
                return _restore(packed, bring)
            return unpack_other(packed)

        return torch.autograd.graph.saved_tensors_hooks(Pack(self, self.bucket_of, outer[0] if outer else SavedOther), unpack)

    def saving_alone(self, bring: Callable[[Bucket], None]) -> contextlib.AbstractContextManager[None]:
        """`saving` for one operation outside of the module that owns the parameter; nothing where these hooks are innermost already, or
        others were set inside the running module (activation checkpointing, offload of activations). Those get everything, as they do
        while the parameter's own module runs: a recomputation must save what forward saved."""
        top = _top_hooks()
        ours = top is None or (isinstance(top[0], Pack) and top[0].owner is not self)
        return self.saving(bring) if ours else contextlib.nullcontext()


def _restore(saved: SavedSlice, bring: Callable[[Bucket], None]) -> Tensor:
    bucket = saved.bucket
    if bucket.version_of(saved.offset) != saved.version:
        raise RuntimeError(
            f"parameters {bucket.subject} were updated or edited in place between the forward and the backward "
            "that reads them; run backward before step"
        )
    bring(bucket)
    if bucket.full is None:
        raise ReleasedParameterError(f"bucket {bucket.subject} belongs to an engine that was destroyed")
    return torch.as_strided(bucket.full, saved.shape, saved.stride, saved.offset)


def _storage_of(t: Tensor) -> int:
    """Address of the memory of `t`, on the meta device of what stands for it; 0 for tensors without any of their own (wrappers,
    fake tensors)."""
    try:
        storage = t.untyped_storage()
        return int(storage._cdata) if t.is_meta else storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _top_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost pair of saved-tensor hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or None
