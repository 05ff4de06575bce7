"""Adagrad in one pass over the memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zeroengine.errors import ConfigError
from zeroengine.ops.adam import refuse_low_precision_states
from zeroengine.ops.optimizer import FusedOptimizer, Group, Plan, check_range
from zeroengine.ops.rules import ADAGRAD, Numbers, adagrad_hypers


class FusedAdagrad(FusedOptimizer):
    """Adagrad (Duchi et al. 2011), as torch.optim.Adagrad. State of each parameter: `step` and `sum`.

    torch fills `sum` when it is built, this one in the first step: the result is the same.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        check_range("lr", float(lr))
        check_range("lr_decay", lr_decay)
        check_range("weight_decay", weight_decay)
        check_range("initial_accumulator_value", initial_accumulator_value)
        check_range("eps", eps)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults)

    def _plan(self, group: Group) -> Plan:
        return Plan(ADAGRAD, ("sum",), group["initial_accumulator_value"])

    def _hypers(self, group: Group, mark: float) -> Numbers:
        return adagrad_hypers(mark, float(group["lr"]), group["lr_decay"], group["eps"], group["weight_decay"])


class CPUAdagrad(FusedAdagrad):
    """FusedAdagrad with the arguments of DeepSpeedCPUAdagrad. `amsgrad` has no meaning for Adagrad and is refused."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ConfigError("CPUAdagrad: amsgrad=True has no meaning for Adagrad; leave it out, or use CPUAdam")
        refuse_low_precision_states(type(self).__name__, fp32_optimizer_states)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


DeepSpeedCPUAdagrad = CPUAdagrad
