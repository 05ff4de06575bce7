"""torch's names: of three functions, which changed between releases, chosen once; and of the reductions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zeroengine.comm.protocol import ReduceOp

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all_single: Any = dist.all_to_all_single

REDUCE_OPS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}
