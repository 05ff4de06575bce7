"""Whole values of sharded parameters in a `with` block, and what was edited there written back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.comm.alike import differ, odd_ranks
from zeroengine.errors import DivergenceError
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.edits import digest
from zeroengine.zero.frozen import FrozenEdits, frozen_whole
from zeroengine.zero.held import editing
from zeroengine.zero.holders import Holders
from zeroengine.zero.residency import slot_of
from zeroengine.zero.sharder import Sharder


class GatheredParameters(contextlib.AbstractContextManager[None]):
    """Inside the block the parameters are whole on every rank and may be read, and edited in place.

    Edits last: they reach the shards and the fp32 masters. With `modifier_rank` the values of that global rank are taken, in all
    replicas; without it every rank that holds a parameter must have made the same edit, and `DivergenceError` on all of them says
    when they did not. Of tensor-parallel layers, experts and pipeline stages a rank holds its own part only: `ModelError` if
    `modifier_rank` has another one. `params`: one parameter or several; ones that no engine holds are left alone. Collective.
    `fwd_module` is accepted for compatibility.
    """

    def __init__(
        self, params: Tensor | Iterable[Tensor], modifier_rank: int | None = None, fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:  # fmt: skip
        given = [params] if isinstance(params, Tensor) else list(params)
        self._unowned = given if enabled else []
        self._buckets: dict[Sharder, list[Bucket]] = {}
        for p in self._unowned:
            slot, frozen = slot_of(p), frozen_whole(p)
            if slot is not None and isinstance(slot.source, Sharder):
                slot.bucket.holders.check_modifier(modifier_rank, slot.name)
                mine = self._buckets.setdefault(slot.source, [])
                if slot.bucket not in mine:
                    mine.append(slot.bucket)
            elif frozen is not None:
                frozen.holders.check_modifier(modifier_rank, frozen.name)
        self._frozen = FrozenEdits([])
        self._modifier_rank = modifier_rank
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._frozen = FrozenEdits(self._unowned)
        self._stack.enter_context(editing(self._unowned, self._modifier_rank))
        for source, buckets in self._buckets.items():
            buckets.sort(key=lambda b: b.index)
            self._stack.enter_context(source.gathered(buckets))

    def __exit__(self, *exc: Any) -> None:
        try:
            for source, buckets in self._buckets.items():
                if exc[0] is not None:
                    source.drop_edits(buckets)
                    continue
                try:
                    for holders, theirs in _by_holders(buckets).items():
                        self._write_back(source, holders, theirs)
                except DivergenceError:
                    source.drop_edits(buckets)  # of sharded values each rank still has its part as it was
                    raise
            unlike = self._frozen.settle(self._modifier_rank) if exc[0] is None else None
            if unlike is not None:
                raise DivergenceError(f"frozen parameters {unlike} were edited inside GatheredParameters, but {_UNLIKE}")
        finally:
            self._stack.__exit__(*exc)

    def _write_back(self, source: Sharder, holders: Holders, buckets: list[Bucket]) -> None:
        facts: list[int] = []
        for bucket in buckets:
            if bucket.full is None:
                continue
            if self._modifier_rank is not None:
                holders.broadcast(bucket.full, f"edit of {bucket.subject}", self._modifier_rank)
            # A write through `.data` is counted nowhere: the bits tell. Every element is in one rank's slice.
            changed = bucket.policy.shard_params and not bucket.keeps(bucket.full)
            facts += [digest(bucket.full), int(changed or bucket.written())]
        buckets = [b for b in buckets if b.full is not None]
        if not buckets:
            return
        table = holders.exchange(torch.tensor(facts, dtype=torch.int64), f"edits of {buckets[0].subject}")
        for bucket, (values, changed_by) in zip(buckets, table.T.reshape(-1, 2, len(holders.ranks)), strict=True):
            odd = odd_ranks(values.tolist(), holders.ranks)
            if odd:
                raise DivergenceError(
                    f"rank {bucket.comm.ranks[bucket.comm.rank]}: parameters of {bucket.subject} were edited inside GatheredParameters "
                    f"({differ(odd, holders.ranks)}), but {_UNLIKE}"
                )
            if bool(changed_by.any()):
                source.edited(bucket)


_UNLIKE = "not to the same values on all ranks; name the rank whose edit counts with modifier_rank=..., or make the same edit everywhere"


def _by_holders(buckets: list[Bucket]) -> dict[Holders, list[Bucket]]:
    """Buckets of experts have others than those of the rest."""
    found: dict[Holders, list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.holders, []).append(bucket)
    return found
