"""What a rank does: one combination after another, each with an engine of its own."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.composition import models, space
from tests.composition.cover import Row
from tests.composition.models import SPOILED_STEP, STEPS, Trained
from zeroengine.comm.leaving import settle_native_threads


@dataclass
class Outcome:
    """Of one combination on one rank: what it trained, or the error that ended it; what the process holds afterwards."""

    trained: Trained | None = None
    error: str = ""
    held: dict[str, int] = field(default_factory=dict)


def run(rank: int, world: int, rows: list[Row], folder: str, dropout: float = 0.0) -> list[Outcome]:
    """Ends behind a combination that failed: the streams between the ranks may be out of order then."""
    import zeroengine

    zeroengine.init_distributed(verbose=False)
    found: list[Outcome] = []
    for row in rows:
        try:
            outcome = Outcome(train(row, folder, dropout))
        except Exception:
            return [*found, Outcome(error=traceback.format_exc())]
        gc.collect()
        outcome.held = held(folder, rank)
        found.append(outcome)
    return found


def held(folder: str, rank: int) -> dict[str, int]:
    """Threads, file descriptors, process groups and files of this rank."""
    settle_native_threads()  # one that has ended for Python may not be gone for the system
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "files": sum(f"rank{rank}." in name for name in os.listdir(folder)),
    }


def prepare(row: Row, dropout: float = 0.0) -> nn.Module:
    model = models.build(row["model"], dropout)
    torch.manual_seed(11)
    if row["recompute"] == "yes":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    if row["pipeline"] == "1":
        return model
    from zeroengine.pipe import split_causal_lm

    return split_causal_lm(model, 2, schedule=row["pipeline"], virtual_stages=2 if row["pipeline"] == "interleaved" else None)


def train(row: Row, folder: str, dropout: float = 0.0) -> Trained:
    import zeroengine

    engine, *_ = zeroengine.initialize(model=prepare(row, dropout), config=space.settings(row, folder))
    found = Trained([], [], {})
    mesh, count = engine.mesh, row["accumulation"]
    for step in range(STEPS):
        spoiled = _spoil(engine) if row["dtype"] == "fp16" and step == SPOILED_STEP else None
        mine = [models.part(row["model"], step, micro, mesh.sample_group, mesh.sample_groups) for micro in range(count)]
        if row["pipeline"] != "1":
            total = float(engine.train_batch(iter(mine)))
        else:
            total = 0.0
            for each in mine:
                loss = engine(**each).loss
                engine.backward(loss)
                engine.step()
                total += float(loss.detach()) / count
        found.losses.append(total)
        found.norms.append(float(engine.get_global_grad_norm()))
        if spoiled is not None:
            spoiled.remove()
    found.loads = {name: layer.load for name, layer in engine.expert_statistics().items()}
    planned, measured = engine.planned_memory(), engine.memory_report()
    found.memory = {kind: (planned[kind], measured[kind]) for kind in planned}
    found.scale, found.skipped = engine.loss_scale, engine.skipped_steps
    found.weights = engine.full_state_dict() or {}
    engine.destroy()
    return found


def _spoil(engine: Any) -> Any:
    """Makes one gradient of the last rank infinite."""
    if engine.mesh.rank != engine.mesh.fabric.world_size - 1:
        return None
    chosen = [p for n, p in engine.module.named_parameters() if p.requires_grad and "expert" not in n][-1]

    def infinite(grad: Tensor) -> Tensor:
        return torch.full_like(grad, float("inf"))

    return chosen.register_hook(infinite)
