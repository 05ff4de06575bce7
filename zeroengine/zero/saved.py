"""Tensors that autograd saves and that lie in gathered values: saved as references, so that the values may go until backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


def top_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost pair of saved-tensor hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or None
