"""Global norm of the gradients, the same bits on every rank and at every stage, and what made it non-finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.ops.flat import squares
from zeroengine.zero.gradients import BucketGradients

_NAME = 256  # bytes of a parameter's name that travel between ranks


def global_norm(gradients: list[BucketGradients], shard_ranks: tuple[int, ...], control: Communicator) -> float:
    """2-norm of all combined gradients (before clipping). Collective.

    Each rank sums squares in fp64 over its own slices, also where it holds more than its slice, so that every stage adds
    the same partial sums in the same order. `shard_ranks`: the ranks whose slices make up one whole.
    """
    mine = squares([_real(g.reduced) for g in gradients])[0].cpu()
    table = control.exchange(mine, "squares of the gradients")
    if shard_ranks != control.ranks:
        place = {r: i for i, r in enumerate(control.ranks)}
        table = table[[place[r] for r in shard_ranks]]
    total = float(table.sum(0).sum()) if gradients else 0.0
    # fp32: the partial sums differ in their last bits with the size of buckets, and the norm should not
    return float(torch.tensor(math.sqrt(total) if math.isfinite(total) else total, dtype=torch.float32))


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def clip_factor(norm: float, max_norm: float) -> float:
    """Factor on the gradients, as torch.nn.utils.clip_grad_norm_ computes it; 1.0 without clipping."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def blame(gradients: list[BucketGradients], control: Communicator) -> str:
    """Names the first parameter whose combined gradient is not finite, with the kind and the rank that holds it. Collective."""
    found: tuple[int, int, int] | None = None  # bucket, parameter, 1 for inf | 2 for NaN
    for i, g in enumerate(gradients):
        if found is not None:
            break
        reduced = g.reduced
        for s in g.bucket.layout.segments(g.bucket.own.start, g.bucket.own.stop):
            part = reduced[s.at : s.at + s.end - s.start]
            if not bool(torch.isfinite(part).all()):
                found = (i, s.index, 2 if bool(torch.isnan(part).any()) else 1)
                break
    table = control.exchange(torch.tensor(found or (-1, -1, 0), dtype=torch.int64), "non-finite gradients")
    rows = [(int(r[0]), int(r[1]), int(r[2]), control.ranks[k]) for k, r in enumerate(table) if int(r[0]) >= 0]
    if not rows:
        return "a sum over gradients that overflowed"
    bucket, index, kind, rank = min(rows)
    # the rank that found it says its name: of experts each rank holds others
    text = gradients[bucket].bucket.layout.specs[index].name.encode()[:_NAME]
    row = torch.zeros(_NAME, dtype=torch.uint8)
    row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    told = control.exchange(row, "name of the parameter")[control.ranks.index(rank)]
    name = bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")
    dtype = str(gradients[bucket].bucket.dtype).removeprefix("torch.")
    return f"{'NaN' if kind == 2 else 'inf'} in the gradient of '{name}' ({dtype}, slice of rank {rank})"
