"""Global norm of the gradients, the same bits on every rank and at every stage, and what made it non-finite."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.comm.texts import exchange_texts
from zeroengine.ops.flat import squares
from zeroengine.zero.gradients import BucketGradients


class NormRule(Protocol):
    """How all ranks that update together agree on the norm of a step's gradients. Both methods are collective."""

    def norm(self, gradients: list[BucketGradients]) -> float:
        """2-norm of all combined gradients, before clipping: the same number on every rank, in fp32."""
        ...

    def blame(self, gradients: list[BucketGradients]) -> str | None:
        """Names the first parameter whose combined gradient is not finite, alike on every rank; None if there is none."""
        ...


class OverShards:
    """The rule where each rank has a slice of everything. `shard_ranks`: the ranks whose slices make up one whole; `control`: all
    that reduce gradients together."""

    def __init__(self, shard_ranks: tuple[int, ...], control: Communicator) -> None:
        self._shard_ranks, self._control = shard_ranks, control

    def norm(self, gradients: list[BucketGradients]) -> float:
        """Each rank sums squares in fp64 over its own slices, also where it holds more than its slice, so that every stage adds
        the same partial sums in the same order."""
        mine = squares([_real(g.reduced) for g in gradients])[0].cpu()
        table = of_one_whole(self._control.exchange(mine, "squares of the gradients"), self._control, self._shard_ranks)
        return root(float(table.sum(0).sum()) if gradients else 0.0)

    def blame(self, gradients: list[BucketGradients]) -> str | None:
        return first_bad(gradients, self._control)


def of_one_whole(table: Tensor, control: Communicator, shard_ranks: tuple[int, ...]) -> Tensor:
    """The rows of `table`, one from each rank of `control`, of the ranks whose slices make up one whole."""
    if shard_ranks == control.ranks:
        return table
    place = {r: i for i, r in enumerate(control.ranks)}
    return table[[place[r] for r in shard_ranks]]


def root(squared: float) -> float:
    """A norm from its square. fp32: the partial sums differ in their last bits with the size of buckets, and the norm should not."""
    return float(torch.tensor(math.sqrt(squared) if math.isfinite(squared) else squared, dtype=torch.float32))


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def clip_factor(norm: float, max_norm: float) -> float:
    """Factor on the gradients, as torch.nn.utils.clip_grad_norm_ computes it; 1.0 without clipping."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def first_bad(gradients: list[BucketGradients], control: Communicator) -> str | None:
    """Names the first parameter whose combined gradient is not finite, with the kind and the rank that holds it. Collective."""
    table = control.exchange(torch.tensor(_bad_here(gradients) or (-1, -1, 0), dtype=torch.int64), "non-finite gradients")
    rows = [(int(r[0]), int(r[1]), int(r[2]), control.ranks[k]) for k, r in enumerate(table) if int(r[0]) >= 0]
    if not rows:
        return None
    number, index, kind, rank = min(rows)
    bucket = gradients[number].bucket
    # the rank that found it says its name: of experts each rank holds others
    name = exchange_texts(control, bucket.layout.specs[index].name, "name of the parameter")[control.ranks.index(rank)]
    dtype = str(bucket.dtype).removeprefix("torch.")
    return f"{'NaN' if kind == 2 else 'inf'} in the gradient of '{name}' ({dtype}, slice of rank {rank})"


def _bad_here(gradients: list[BucketGradients]) -> tuple[int, int, int] | None:
    """(bucket, parameter, 1 for inf | 2 for NaN) of the first one in this rank's slices."""
    for number, g in enumerate(gradients):
        reduced = g.reduced
        for s in g.bucket.layout.segments(g.bucket.own.start, g.bucket.own.stop):
            part = reduced[s.at : s.at + s.end - s.start]
            if not bool(torch.isfinite(part).all()):
                return number, s.index, 2 if bool(torch.isnan(part).any()) else 1
    return None


def first_told(ranks: Communicator, found: str | None) -> str | None:
    """Of what each of `ranks` (control) has `found`, the first. Collective."""
    return next((text for text in exchange_texts(ranks, found or "", "non-finite gradients of other parts") if text), None)
