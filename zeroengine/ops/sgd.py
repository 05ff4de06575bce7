"""Gradient descent with momentum in one pass over the memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zeroengine.errors import ConfigError
from zeroengine.ops.optimizer import FusedOptimizer, Group, Plan, check_range
from zeroengine.ops.rules import SGD, SGD_MOMENTUM, SGD_NESTEROV, Numbers, sgd_hypers


class FusedSGD(FusedOptimizer):
    """torch.optim.SGD: momentum with dampening or Nesterov's, weight decay. State, with momentum: `momentum_buffer`."""

    counted = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_range("lr", float(lr))
        check_range("momentum", momentum)
        check_range("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(f"nesterov=True needs momentum above 0 and dampening 0; they are {momentum} and {dampening}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": bool(nesterov),
        }
        super().__init__(params, defaults)

    def _plan(self, group: Group) -> Plan:
        if group["momentum"] == 0:
            return Plan(SGD, ())
        return Plan(SGD_NESTEROV if group["nesterov"] else SGD_MOMENTUM, ("momentum_buffer",))

    def _hypers(self, group: Group, mark: float) -> Numbers:
        first, momentum = mark == 1.0, float(group["momentum"])
        return sgd_hypers(first, float(group["lr"]), momentum, group["dampening"], group["weight_decay"])
