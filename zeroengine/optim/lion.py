"""Lion, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroengine.optim.kinds import evaluate


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2: the sign of a blend of gradient
    and momentum, with decoupled weight decay. One state tensor like the parameter, `exp_avg`. Parameters of any shape
    and floating dtype."""

    elementwise = True
    steps_apart = True

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        """Raises ValueError for values out of range."""
        if lr < 0 or weight_decay < 0 or len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"Lion: lr {lr} and weight_decay {weight_decay} are 0 or more, betas {betas} are two in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                momentum = state["exp_avg"]
                direction = momentum.lerp(p.grad, 1 - first).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction.mul_(group["lr"]), alpha=-1)
                momentum.lerp_(p.grad, 1 - second)
        return loss
