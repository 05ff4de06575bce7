"""Lion in one pass over the memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zeroengine.ops.adam import refuse_low_precision_states
from zeroengine.ops.optimizer import FusedOptimizer, Group, Plan, as_betas, check_range
from zeroengine.ops.rules import LION, Numbers, lion_hypers


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023): the sign of an interpolated momentum, with decoupled weight decay.

    State of each parameter: `step` and `exp_avg`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        check_range("lr", float(lr))
        check_range("weight_decay", weight_decay)
        super().__init__(params, {"lr": lr, "betas": as_betas(betas), "weight_decay": weight_decay})

    def _plan(self, group: Group) -> Plan:
        return Plan(LION, ("exp_avg",))

    def _hypers(self, group: Group, mark: float) -> Numbers:
        return lion_hypers(float(group["lr"]), group["betas"], group["weight_decay"])


class CPULion(FusedLion):
    """FusedLion with the arguments of DeepSpeedCPULion."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_low_precision_states(type(self).__name__, fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


DeepSpeedCPULion = CPULion
