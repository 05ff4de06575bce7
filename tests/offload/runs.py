"""Short training runs whose every bit is compared: one after another in the same processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.models import TinyLM, config, tokens

STEPS = 3
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


@dataclass
class Plan:
    """One run. `state` and `values`: sections offload_optimizer and offload_param, a folder filled in for nvme."""

    stage: int
    state: dict[str, Any] | None = None
    values: dict[str, Any] | None = None
    dtype: str = "fp32"
    optimizer: Any = field(default_factory=lambda: ADAMW)  # a section, or the name of a factory below
    changes: dict[str, Any] = field(default_factory=dict)

    def settings(self, folder: str) -> dict[str, Any]:
        zero: dict[str, Any] = {}
        for name, section in (("offload_optimizer", self.state), ("offload_param", self.values)):
            if section is not None:
                zero[name] = {**section, **({"nvme_path": folder} if section["device"] == "nvme" else {})}
        changes = {k: v for k, v in self.changes.items() if k != "zero_optimization"}
        zero.update(self.changes.get("zero_optimization", {}))
        if self.dtype != "fp32":
            changes[self.dtype] = {"enabled": True, **changes.get(self.dtype, {})}
        if isinstance(self.optimizer, dict):
            changes["optimizer"] = self.optimizer
        made = config(self.stage, zero_optimization=zero, **changes)
        if not isinstance(self.optimizer, dict):
            del made["optimizer"]
        return made


class Slow(torch.optim.AdamW):
    """A class that is not known to be element-wise: whole parameters."""

    elementwise = False
    steps_apart = True


FACTORIES: dict[str, Any] = {
    "torch": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "unknown": lambda groups: Slow(groups, lr=1e-2),
}


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    memory: dict[str, int]
    planned: dict[str, int]
    moved: dict[str, int]


def start(plan: Plan, folder: str, seed: int = 1, **model: Any) -> Any:
    import zeroengine

    torch.manual_seed(seed)
    source = None if isinstance(plan.optimizer, dict) else FACTORIES[plan.optimizer]
    return zeroengine.initialize(model=TinyLM(**model), config=plan.settings(folder), optimizer=source)[0]


def advance(engine: Any, rank: int, first: int = 0, steps: int = STEPS) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*tokens(step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def moved(engine: Any) -> dict[str, int]:
    total = {"read": 0, "written": 0}
    for store in engine.mechanism.placement.stores:
        for kind, count in store.moved.items():
            total[kind] += count
    return total


def run(plan: Plan, rank: int, folder: str) -> Run:
    engine = start(plan, folder)
    losses, norms = advance(engine, rank)
    memory, planned, bytes_moved = engine.memory_report(), engine.planned_memory(), moved(engine)
    weights = engine.full_state_dict() or {}
    engine.destroy()
    return Run(losses, norms, dict(weights), memory, planned, bytes_moved)


def run_all(rank: int, world: int, plans: list[Plan], folder: str) -> list[Run]:
    results = [run(plan, rank, folder) for plan in plans]
    left = [p.name for p in Path(folder).iterdir() if f"rank{rank}." in p.name]
    if left:
        raise AssertionError(f"rank {rank} left {left}")
    return results


def difference(a: Run, b: Run) -> str:
    """Empty if two runs agree to the last bit."""
    if a.losses != b.losses:
        return f"losses {a.losses} and {b.losses}"
    if a.norms != b.norms:
        return f"norms {a.norms} and {b.norms}"
    return next((n for n, w in a.weights.items() if not torch.equal(w, b.weights[n])), "")
