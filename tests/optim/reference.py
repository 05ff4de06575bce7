"""Optimizers in one process, written out plainly or torch's own, and the small model that the tests of this folder train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.versus_torch import Where, fresh

D = 6
Named = list[tuple[str, nn.Parameter]]
Step = Callable[[], None]


class Net(nn.Module):
    """Odd sizes, an embedding, a convolution, a scalar, and a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, D)
        self.up, self.norm = nn.Linear(D, 9), nn.LayerNorm(9)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.down, self.scale = nn.Linear(9, 3), nn.Parameter(torch.ones(()))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x.tanh() + self.embed.weight.sum(0))).tanh()
        h = self.conv(h.unsqueeze(1)).mean(1)
        return self.scale * self.down(h)


def loss_of(model: nn.Module, where: Where, same: bool = False) -> Tensor:
    return model(where.same(4, D) if same else where.data(4, D)).square().mean()


class CountingAdam(torch.optim.Optimizer):
    """Scales by norms, counts its calls in the group, keeps a number and an own-shaped tensor: as users' optimizers do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, rows=torch.zeros(p.shape[:1]), mean=torch.zeros_like(p))
                state["count"] += 1
                rows = p.grad.square().flatten(1).sum(1) if p.dim() > 1 else p.grad.square()
                state["rows"].lerp_(rows.view(state["rows"].shape), 0.5)
                state["mean"].lerp_(p.grad / (0.1 + p.grad.norm()), 0.5)
                size = 0.1 + state["rows"].mean().sqrt() * state["count"] / group["calls"]
                p.sub_(group["lr"] * state["mean"] / size)


def lion(params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float) -> Step:
    params, momenta = list(params), {}

    @torch.no_grad()
    def step() -> None:
        for p in params:
            if p.grad is not None:
                m = momenta.setdefault(p, torch.zeros_like(p))
                update = torch.sign(betas[0] * m + (1 - betas[0]) * p.grad)
                p.copy_(p * (1 - lr * weight_decay) - lr * update)
                m.copy_(betas[1] * m + (1 - betas[1]) * p.grad)

    return step


def lamb(params: Iterable[nn.Parameter], lr: float, weight_decay: float, eps: float, max_coeff: float) -> Step:
    params, state = list(params), {}

    @torch.no_grad()
    def step() -> None:
        for p in params:
            if p.grad is not None:
                m, v, n = state.get(p, (torch.zeros_like(p), torch.zeros_like(p), 0))
                m, v, n = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2, n + 1
                state[p] = (m, v, n)
                update = (m / (1 - 0.9**n)) / ((v / (1 - 0.999**n)).sqrt() + eps) + weight_decay * p
                trust = (p.norm() / update.norm()).clamp(0.01, max_coeff) if p.norm() > 0 and update.norm() > 0 else 1.0
                p.sub_(lr * trust * update)

    return step


def muon(named: Named, lr: float, adam_lr: float, weight_decay: float) -> Step:
    """torch's Muon over matrices (the convolution as one), torch's AdamW over the rest."""
    matrices = {n: p for n, p in named if p.dim() > 1 and "embed" not in n}
    flat = {n: nn.Parameter(p.data.view(len(p), -1)) for n, p in matrices.items()}
    first = torch.optim.Muon(flat.values(), lr=lr, weight_decay=weight_decay)
    rest = [p for n, p in named if n not in matrices]
    second = torch.optim.AdamW(rest, lr=adam_lr, weight_decay=weight_decay, betas=(0.9, 0.95), eps=1e-3)

    def step() -> None:
        for n, p in matrices.items():
            flat[n].grad = None if p.grad is None else p.grad.view(len(p), -1)
        first.step()
        second.step()

    return step


def train_one(make: Callable[[Named], Step], ranks: int, steps: int, same: bool = False) -> dict[str, Tensor]:
    """Weights after `steps` steps on the mean over ranks, which is summed as the ranks sum it."""
    model = fresh(Net)
    step = make(list(model.named_parameters()))
    for i in range(steps):
        total: dict[str, Tensor] = {}
        for rank in range(ranks):
            loss_of(model, Where(i, 0, rank, ranks), same).backward()
            for n, p in model.named_parameters():
                if p.grad is not None:
                    total[n] = total[n] + p.grad if n in total else p.grad.clone()
                p.grad = None
        for n, p in model.named_parameters():
            p.grad = total[n] * (1.0 / ranks) if n in total else None
        step()
        model.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}
