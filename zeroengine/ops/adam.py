"""Adam and AdamW in one pass over the memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zeroengine.errors import ConfigError
from zeroengine.ops.optimizer import FusedOptimizer, Group, Plan, as_betas, check_range
from zeroengine.ops.rules import ADAM, ADAM_MAX, ADAMW, ADAMW_MAX, Numbers, adam_hypers


class FusedAdam(FusedOptimizer):
    """Adam (Kingma & Ba 2015), with decoupled weight decay (Loshchilov & Hutter 2019) unless `adam_w_mode` is false.

    State of each parameter: `step`, `exp_avg`, `exp_avg_sq` and, with amsgrad, `max_exp_avg_sq`, as in torch.optim.Adam and
    AdamW, whose state it loads. `set_grad_none` is accepted and has no effect: zero_grad frees gradients by default.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_range("lr", float(lr))
        check_range("eps", eps)
        check_range("weight_decay", weight_decay)
        defaults = {
            "lr": lr,
            "bias_correction": bool(bias_correction),
            "betas": as_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": bool(amsgrad),
            "decoupled_weight_decay": bool(adam_w_mode),  # torch's name for it
        }
        super().__init__(params, defaults)

    @property
    def adam_w_mode(self) -> bool:
        return bool(self.defaults["decoupled_weight_decay"])

    def _fixed(self) -> dict[str, Any]:
        return {"decoupled_weight_decay": self.adam_w_mode}

    def _plan(self, group: Group) -> Plan:
        if group["amsgrad"]:
            return Plan(ADAMW_MAX if self.adam_w_mode else ADAM_MAX, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
        return Plan(ADAMW if self.adam_w_mode else ADAM, ("exp_avg", "exp_avg_sq"))

    def _hypers(self, group: Group, mark: float) -> Numbers:
        lr, decoupled, corrected = float(group["lr"]), self.adam_w_mode, group["bias_correction"]
        return adam_hypers(mark, lr, group["betas"], group["eps"], group["weight_decay"], decoupled, corrected)


class CPUAdam(FusedAdam):
    """FusedAdam with the arguments of DeepSpeedCPUAdam, for masters and moments in the memory of the CPU.

    Moments are fp32 whatever the parameters are; `fp32_optimizer_states=False` is refused.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse_low_precision_states(type(self).__name__, fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


def refuse_low_precision_states(name: str, fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        raise ConfigError(f"{name}: moments are always fp32; leave out fp32_optimizer_states=False")


DeepSpeedCPUAdam = CPUAdam
