"""Names of `deepspeed.moe.utils` that scripts call. The engine tells experts apart by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeroengine.zero.experts import expert_part


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The groups as they are: parameters of experts and others may lie in one. `max_group_size` is accepted and not needed."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def is_moe_param(param: Tensor) -> bool:
    """Whether `param` belongs to an expert that only some ranks hold."""
    return expert_part(param) is not None
