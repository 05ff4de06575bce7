"""Reductions over ranks in an order that is fixed by rank number alone.

Neighbours first: ((r0+r1)+(r2+r3))+..., an odd leftover carried up unchanged. The order is the same for every element,
so a sum does not depend on where a bucket is cut, and a reduction over 2^k neighbours followed by one across those
groups gives the bits of a flat one. The number of torch calls grows with log2 of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroengine.comm.protocol import ReduceOp

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


def wide_rows(rows: Tensor, dtype: torch.dtype, scratch: Tensor) -> Tensor:
    """First level of a sum of `rows` [N, S] in another dtype: [ceil(N/2), S] of neighbours' sums, made in `scratch`."""
    n = rows.shape[0]
    wide = scratch.view((n + 1) // 2, rows.shape[1])
    wide.copy_(rows[0::2])
    wide[: n // 2].add_(rows[1::2])
    return wide


def reduce_rows(rows: Tensor, op: ReduceOp, out: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
    """out [S] = scale * reduction of `rows` [N, S] in fixed order, added to `out` when `accumulate`. Overwrites `rows`.

    Scaling and accumulating are separate operations on purpose: fused, their rounding would depend on whether an
    element falls in a vectorised body or in its tail, that is on where the buffer is cut.
    """
    n, step, combine = rows.shape[0], 1, _COMBINE[op]
    while 2 * step < n:
        lower = rows[: n - step : 2 * step]
        combine(lower, rows[step :: 2 * step], out=lower)
        step *= 2
    total = rows[0] if accumulate else out
    if step < n:
        combine(rows[0], rows[step], out=total)
    elif not accumulate:
        out.copy_(rows[0])
    if scale != 1.0:
        total.mul_(scale)
    if accumulate:
        out.add_(total)
