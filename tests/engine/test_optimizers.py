"""Optimizers in every form in which a user gives them: every stage updates as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroengine
from tests.engine.versus_torch import DEFAULT, STAGES, TINY, Where, check, difference, fresh, one_mesh, whole_weights

pytestmark = pytest.mark.ranks
D = 6
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, D))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices only, told by `ndim`; another rate for the second linear."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if p.ndim > 1 and n[0] == "0"], "weight_decay": 0.5},
        {"params": [p for n, p in named if p.ndim > 1 and n[0] == "3"], "weight_decay": 0.5, "lr": 0.05},
        {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def subset(model: nn.Module) -> list[nn.Parameter]:
    return list(model[0].parameters())  # type: ignore[index]


def with_frozen(model: nn.Module) -> list[nn.Parameter]:
    model[1].requires_grad_(False)  # type: ignore[index]
    return list(model.parameters())


Over = Callable[[nn.Module], Any]
# name: (what the optimizer is over, how it is given)
WAYS: dict[str, tuple[Over, str]] = {
    "groups as model_parameters": (decay_groups, "model_parameters"),
    "groups in an optimizer": (decay_groups, "object"),
    "all in an optimizer": (lambda m: list(m.parameters()), "object"),
    "named parameters": (lambda m: list(m.named_parameters()), "model_parameters"),
    "a generator": (lambda m: m.parameters(), "model_parameters"),
    "one group": (lambda m: {"params": list(m.parameters()), "lr": 0.03}, "model_parameters"),
    "a function": (lambda m: None, "function"),
    "a class": (lambda m: None, "class"),
    "a subset": (subset, "model_parameters"),
    "a subset in an optimizer": (subset, "object"),
    "frozen ones among them": (with_frozen, "object"),
}


def reference(over: Over, how: str, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    model = fresh(mlp)
    given = over(model)
    given = [given] if isinstance(given, dict) else list(model.parameters()) if given is None else given
    optimizer = torch.optim.AdamW(given, **({} if how == "class" else ADAMW))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    for step in range(3):
        for rank in range(ranks):
            (model(Where(step, 0, rank, ranks).data(5, D)).square().mean() / ranks).backward()
        optimizer.step()
        model.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return {n: p.detach() for n, p in model.named_parameters()}, rates


def _ways(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for name, (over, how) in WAYS.items():
        expected, rates = reference(over, how, ranks)
        for stage in STAGES:
            for bucket in (TINY, DEFAULT):
                label = f"{name} stage {stage} bucket {bucket}"
                model = fresh(mlp)
                given = over(model)
                arguments: dict[str, Any] = {}
                config: dict[str, Any] = {
                    "train_micro_batch_size_per_gpu": 1,
                    "zero_optimization": {"stage": stage, **({"bucket_size": bucket} if bucket else {})},
                }
                if how == "object":
                    arguments["optimizer"] = torch.optim.AdamW(given, **ADAMW)
                    # a scheduler on the user's own object acts on the engine
                    arguments["lr_scheduler"] = torch.optim.lr_scheduler.ExponentialLR(arguments["optimizer"], 0.5)
                elif how == "function":
                    arguments["optimizer"] = lambda groups: torch.optim.AdamW(groups, **ADAMW)
                elif how == "class":
                    arguments["optimizer"] = torch.optim.AdamW
                else:
                    arguments["model_parameters"] = given
                    config["optimizer"] = {"type": "AdamW", "params": ADAMW}
                arguments.setdefault("lr_scheduler", lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
                engine, optimizer, _, scheduler = zeroengine.initialize(model=model, config=config, mesh=mesh, **arguments)
                seen = []
                for step in range(3):
                    engine.backward(engine(Where(step, 0, rank, ranks).data(5, D)).square().mean())
                    engine.step()
                    seen.append(engine.get_lr()[0])
                if seen != rates:
                    faults.append(f"{label}: rates {seen}, not {rates}")
                worst, who = difference(whole_weights(engine), expected)
                if not worst <= 2e-6:
                    faults.append(f"{label}: weights differ by {worst:.2e} in {who}")
                engine.destroy()
    return faults


def test_every_way_to_give_an_optimizer() -> None:
    check(_ways)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.first(x).tanh()
        return self.last(torch.stack([self.experts[i](x).tanh() for i in chosen]).sum(0))


def _experts(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    model = fresh(Experts)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    choice = [[[0, 1], [2, 3]], [[3], [0, 1, 2]], [[], []]]
    for step, rows in enumerate(choice[:2]):
        for r, chosen in enumerate(rows):
            (model(Where(step, 0, r, ranks).data(5, D), chosen).square().mean() / ranks).backward()
        optimizer.step()
        model.zero_grad()
    expected = {n: p.detach() for n, p in model.named_parameters()}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": ADAMW}}
    for stage, bucket in ((0, TINY), (1, TINY), (2, TINY), (0, None), (1, None), (2, None), (3, None), (3, TINY)):
        zero = {"stage": stage, **({"bucket_size": bucket} if bucket else {})}
        engine = zeroengine.initialize(model=fresh(Experts), config={**config, "zero_optimization": zero}, mesh=mesh)[0]
        for step, rows in enumerate(choice[:2]):
            engine.backward(engine(Where(step, 0, rank, ranks).data(5, D), rows[rank]).square().mean())
            engine.step()
        worst, who = difference(whole_weights(engine), expected)
        if not worst <= 2e-6:
            faults.append(f"stage {stage} bucket {bucket}: weights differ by {worst:.2e} in {who}")
        engine.destroy()
    return faults


def test_experts_that_only_some_ranks_use() -> None:
    check(_experts)
