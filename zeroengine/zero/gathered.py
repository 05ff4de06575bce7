"""Whole values of sharded parameters in a `with` block, and what was edited there written back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from zeroengine.errors import DivergenceError
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.edits import digest, same_bits
from zeroengine.zero.held import HeldGroup, HeldParameter
from zeroengine.zero.residency import ValueSource, slot_of
from zeroengine.zero.sharder import Sharder

Whole = Bucket | HeldParameter
Editor = Any  # a `Sharder` of buckets, or a `HeldGroup` of parameters that no engine has yet


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
        self._buckets: dict[ValueSource, list[Whole]] = {}
        for p in given if enabled else []:
            slot = slot_of(p)
            if slot is not None and slot.source is not None:
                mine = self._buckets.setdefault(slot.source, [])
                if slot.bucket not in mine:
                    mine.append(slot.bucket)
        self._modifier_rank = modifier_rank
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for source, buckets in self._buckets.items():
            if isinstance(source, (Sharder, HeldGroup)):
                buckets.sort(key=lambda b: b.index)
                self._stack.enter_context(cast(Editor, source).gathered(buckets))

    def __exit__(self, *exc: Any) -> None:
        try:
            for source, buckets in self._buckets.items():
                if not isinstance(source, (Sharder, HeldGroup)) or not buckets:
                    continue
                if exc[0] is None:
                    self._write_back(source, buckets)
                elif isinstance(source, Sharder):
                    source.drop_edits(cast(list[Bucket], buckets))
        finally:
            self._stack.close()

    def _write_back(self, source: Editor, buckets: list[Whole]) -> None:
        facts: list[int] = []
        for bucket in buckets:
            if bucket.full is None:
                continue
            if self._modifier_rank is not None:
                bucket.comm.broadcast(bucket.full, self._modifier_rank, f"edit of {bucket.subject}").wait()
            facts += [digest(bucket.full.view(-1)), int(_changed(bucket, bucket.full))]
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
                    f"rank {comm.ranks[comm.rank]}: parameters of {bucket.subject} were edited inside GatheredParameters, but "
                    f"not to the same values on all ranks (ranks {odd} differ from rank {comm.ranks[0]}); name the rank whose "
                    "edit counts with modifier_rank=..., or make the same edit everywhere"
                )
            if bool(changed_by.any()):
                source.edited(bucket)


def _changed(whole: Whole, full: Tensor) -> bool:
    """Whether the values are not those that were gathered. What no engine holds yet is always taken over."""
    if isinstance(whole, HeldParameter):
        return True
    # A write through `.data` is counted nowhere: the bits tell. Every element is in one rank's slice.
    return whole.written() or (whole.policy.shard_params and not same_bits(full[whole.own], whole.shard))
