"""Activations that wait for backward elsewhere: on the host of an accelerator, or on a disk.

Both are pairs of autograd's saved-tensor hooks, so they reach what autograd saves: all activations of the modules that run
inside, or the inputs of a recomputed segment (`torch.utils.checkpoint` with use_reentrant=True saves those). Weights stay: the
sharder's hooks, further in, keep references to buckets (`zero/sharder.py`), and memory of other parameters is told by address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zeroengine.offload.record import Record
from zeroengine.offload.store import DiskStore

_NEXT = 2  # records that are read ahead in backward


class _Saved:
    """A tensor that autograd saved, in a record. With the last reference the place in the file is free again."""

    def __init__(self, owner: ActivationsOnDisk, tensor: Tensor) -> None:
        self._owner = owner
        self.held = tensor.detach()
        self.version = tensor._version
        self._source = tensor if tensor.grad_fn is None else None  # an output would hold its own graph alive
        held = self.held
        self.record: Record = owner.store.record(f"an activation of shape {tuple(tensor.shape)}", lambda: [held])
        self.record.bring()
        self.record.put(changed=True)
        owner.store.check_writes()

    def values(self) -> Tensor:
        if self._source is not None and self._source._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.held.shape)} that backward needs was changed in place since forward; use the "
                "out-of-place operation"
            )
        self._owner.approach(self)
        self.record.bring()
        try:
            return self.held.clone()
        finally:
            self.record.put(changed=False)

    def __del__(self) -> None:
        self._owner.forget(self)


class ActivationsOnDisk(contextlib.AbstractContextManager[None]):
    """Inside, tensors of `least` bytes and more that autograd saves go to `store`, and come back when backward reads them, the
    next ones ahead. `keep`: tensors (parameters) whose memory stays where it is. May be entered once for each forward.

    Raises OffloadError in forward and backward where the disk fails.
    """

    def __init__(self, store: DiskStore, keep: Iterable[Tensor], least: int) -> None:
        self.store = store
        self._keep = {_address(t) for t in keep}
        self._least = least
        self._live: list[_Saved] = []  # in the order in which they were saved; backward reads from the end
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        usual = tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not usual or tensor.nbytes < self._least or _address(tensor) in self._keep:
            return tensor if tensor.grad_fn is None else tensor.detach()
        saved = _Saved(self, tensor)
        self._live.append(saved)
        return saved.record, saved

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].values()

    def approach(self, saved: _Saved) -> None:
        """Backward is at `saved`: those that were saved before it come next."""
        while self._live and self._live[-1] is not saved:
            self._live.pop()
        for before in reversed(self._live[-1 - _NEXT : -1]):
            before.record.ahead()

    def forget(self, saved: _Saved) -> None:
        record = getattr(saved, "record", None)
        if record is not None:
            self.store.release(record)


def _address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for tensors without any of their own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
