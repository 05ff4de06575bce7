"""Whole values of sharded parameters in a `with` block, and what was edited there written back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import DivergenceError
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.held import editing
from zeroengine.zero.residency import ValueSource, slot_of
from zeroengine.zero.sharder import Sharder


class GatheredParameters(contextlib.AbstractContextManager[None]):
    """Inside the block the parameters are whole on every rank and may be read, and edited in place.

    Edits last: they reach the shards and the fp32 masters. With `modifier_rank` the values of that rank (of the shard
    group) are taken; without it every rank must have made the same edit, and `DivergenceError` on all ranks says when they
    did not. `params`: one parameter or several; ones that no engine holds are left alone. Collective. `fwd_module` is
    accepted for compatibility.
    """

    def __init__(
        self, params: Tensor | Iterable[Tensor], modifier_rank: int | None = None, fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:  # fmt: skip
        given = [params] if isinstance(params, Tensor) else list(params)
        self._unowned = given if enabled else []
        self._buckets: dict[ValueSource, list[Bucket]] = {}
        for p in given if enabled else []:
            slot = slot_of(p)
            if slot is not None and isinstance(slot.source, Sharder):
                mine = self._buckets.setdefault(slot.source, [])
                if slot.bucket not in mine:
                    mine.append(slot.bucket)
        self._modifier_rank = modifier_rank
        self._stack = contextlib.ExitStack()
        self._before: dict[Bucket, Tensor] = {}

    def __enter__(self) -> None:
        self._stack.enter_context(editing(self._unowned, self._modifier_rank))
        for source, buckets in self._buckets.items():
            if isinstance(source, Sharder):
                buckets.sort(key=lambda b: b.index)
                self._stack.enter_context(source.gathered(buckets))
                for bucket in buckets:
                    self._before[bucket] = _digest(bucket)

    def __exit__(self, *exc: Any) -> None:
        try:
            if exc[0] is None:
                for source in self._buckets:
                    if isinstance(source, Sharder):
                        self._write_back(source)
        finally:
            self._before.clear()
            self._stack.__exit__(*exc)

    def _write_back(self, source: Sharder) -> None:
        for bucket in self._buckets[source]:
            if self._modifier_rank is not None and bucket.full is not None:
                bucket.comm.broadcast(bucket.full, self._modifier_rank, f"edit of {bucket.subject}").wait()
            now = _digest(bucket)
            table = bucket.comm.exchange(
                torch.stack([self._before[bucket], now]).flatten(), f"edit of {bucket.subject}"
            )
            halves = table.view(bucket.comm.size, 2, -1)
            if torch.equal(halves[:, 0], halves[:, 1]):
                continue
            if not bool((halves[:, 1] == halves[0, 1]).all()):
                odd = [
                    bucket.comm.ranks[r] for r in range(bucket.comm.size) if not torch.equal(halves[r, 1], halves[0, 1])
                ]
                raise DivergenceError(
                    f"rank {bucket.comm.ranks[bucket.comm.rank]}: parameters of {bucket.subject} were edited inside "
                    f"GatheredParameters, but not to the same values on all ranks (ranks {odd} differ from rank "
                    f"{bucket.comm.ranks[0]}); name the rank whose edit counts with modifier_rank=..., or make the same edit "
                    "everywhere"
                )
            source.edited(bucket)


def _digest(bucket: Bucket) -> Tensor:
    """Two sums over the bits of the values: equal for equal values, different for nearly all others."""
    if bucket.full is None:
        return torch.zeros(2, dtype=torch.int64)
    raw = bucket.full.view(torch.uint8)
    words = raw[: raw.numel() // 4 * 4].view(torch.int32)
    tail = raw[words.numel() * 4 :]
    weights = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
    first = words.sum(dtype=torch.int64) + tail.sum(dtype=torch.int64)
    second = (words * weights).sum() + 3 * tail.sum(dtype=torch.int64)
    return torch.stack([first, second]).cpu()
