"""Whole values of sharded parameters in a `with` block, and what was edited there written back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import DivergenceError
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.edits import digest
from zeroengine.zero.frozen import FrozenEdits
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
        self._frozen = FrozenEdits([])
        self._modifier_rank = modifier_rank
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._frozen = FrozenEdits(self._unowned)
        self._stack.enter_context(editing(self._unowned, self._modifier_rank))
        for source, buckets in self._buckets.items():
            if isinstance(source, Sharder):
                buckets.sort(key=lambda b: b.index)
                self._stack.enter_context(source.gathered(buckets))

    def __exit__(self, *exc: Any) -> None:
        try:
            for source, buckets in self._buckets.items():
                if not isinstance(source, Sharder) or not buckets:
                    continue
                if exc[0] is not None:
                    source.drop_edits(buckets)
                    continue
                try:
                    for alike in _by_group(buckets):
                        self._write_back(source, alike)
                except DivergenceError:
                    source.drop_edits(buckets)  # of sharded values each rank still has its part as it was
                    raise
            unlike = self._frozen.settle(self._modifier_rank) if exc[0] is None else None
            if unlike is not None:
                raise DivergenceError(f"frozen parameters {unlike} were edited inside GatheredParameters, but {_UNLIKE}")
        finally:
            self._stack.__exit__(*exc)

    def _write_back(self, source: Sharder, buckets: list[Bucket]) -> None:
        facts: list[int] = []
        for bucket in buckets:
            if bucket.full is None:
                continue
            if self._modifier_rank is not None:
                bucket.comm.broadcast(bucket.full, self._modifier_rank, f"edit of {bucket.subject}").wait()
            # A write through `.data` is counted nowhere: the bits tell. Every element is in one rank's slice.
            changed = bucket.policy.shard_params and not bucket.keeps(bucket.full)
            facts += [digest(bucket.full), int(changed or bucket.written())]
        buckets = [b for b in buckets if b.full is not None]
        if not buckets:
            return
        comm = buckets[0].comm
        table = comm.exchange(torch.tensor(facts, dtype=torch.int64), f"edits of {buckets[0].subject}")
        for i, bucket in enumerate(buckets):
            values, changed_by = table.view(comm.size, -1, 2)[:, i].unbind(1)
            if not bool((values == values[0]).all()):
                odd = [comm.ranks[r] for r in range(comm.size) if values[r] != values[0]]
                raise DivergenceError(
                    f"rank {comm.ranks[comm.rank]}: parameters of {bucket.subject} were edited inside GatheredParameters "
                    f"(ranks {odd} differ from rank {comm.ranks[0]}), but {_UNLIKE}"
                )
            if bool(changed_by.any()):
                source.edited(bucket)


_UNLIKE = "not to the same values on all ranks; name the rank whose edit counts with modifier_rank=..., or make the same edit everywhere"


def _by_group(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets by the ranks that share them: those of experts have others."""
    found: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(id(bucket.comm), []).append(bucket)
    return list(found.values())
