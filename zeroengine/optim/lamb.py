"""LAMB, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeroengine.ops.optimizer import evaluate


class Lamb(torch.optim.Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2: Adam's direction plus decay, scaled for
    each parameter by |weights| / |direction|, kept in [`min_coeff`, `max_coeff`] as DeepSpeed does (1 where a norm is 0).

    `bias_correction` corrects the moments as in the paper; DeepSpeed corrects the step size instead, which scales the
    decay, too. State: `step`, `exp_avg`, `exp_avg_sq`. Needs whole parameters.
    """

    elementwise = False
    steps_apart = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        """Raises ValueError for values out of range."""
        if lr < 0 or eps < 0 or weight_decay < 0 or len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"Lamb: lr {lr}, eps {eps} and weight_decay {weight_decay} are 0 or more, betas {betas} are two in [0, 1)")
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"Lamb: 0 <= min_coeff <= max_coeff, not {min_coeff} and {max_coeff}")
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "max_coeff": max_coeff, "min_coeff": min_coeff,
        })  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    direction = self._direction(p, p.grad, group)
                    p.add_(direction.mul_(group["lr"] * _trust(p, direction, group)), alpha=-1)
        return loss

    def _direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        first, second = group["betas"]
        state["step"] += 1
        mean = state["exp_avg"].lerp_(grad, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        if group["bias_correction"]:
            steps = float(state["step"])
            mean, square = mean / (1 - first**steps), square / (1 - second**steps)
        return (mean / (square.sqrt() + group["eps"])).add_(p, alpha=group["weight_decay"])


def _trust(p: Tensor, direction: Tensor, group: dict[str, Any]) -> float:
    weights, update = float(torch.linalg.vector_norm(p)), float(torch.linalg.vector_norm(direction))
    if weights == 0.0 or update == 0.0:
        return 1.0
    return min(max(weights / update, group["min_coeff"]), group["max_coeff"])
