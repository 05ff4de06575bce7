"""Process groups by DeepSpeed's names. The data-parallel group is the world: an engine with other degrees has a `mesh`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from zeroengine.comm import all_gather_into_tensor, reduce_scatter_tensor


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group: Any = dist.group.WORLD
    return group


def ranks_of(group: dist.ProcessGroup | None = None) -> list[int]:
    return dist.get_process_group_ranks(world_group() if group is None else group)


def global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def all_gather_into(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False, debug: bool = False) -> Any:
    return all_gather_into_tensor(output, tensor, group=group, async_op=async_op)


def reduce_scatter_into(
    output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, debug: bool = False
) -> Any:
    return reduce_scatter_tensor(output, tensor, op=op, group=group, async_op=async_op)
