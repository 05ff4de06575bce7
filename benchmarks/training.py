"""The job of a process in `benchmarks.compare`: trains one system, and times and weighs every turn."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch
from torch import nn

from benchmarks import memory
from benchmarks.model import build_model, count_parameters, step_batches
from benchmarks.settings import Settings
from benchmarks.systems import make_system


def _load_kernels() -> None:
    """One step of a tiny layer, so that torch's own lazily made tables are not billed to the model."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(4, 64)).sum().backward()
    optimizer.step()


class TrainingJob:
    """Memory is reported as growth over what the process occupied just before the model was made."""

    def __init__(self, system: str, settings: dict[str, Any]):
        self.settings = Settings(**settings)
        torch.set_num_threads(self.settings.threads)
        self.rank = int(os.environ["RANK"])
        chosen = make_system(system)
        chosen.prepare(self.settings)
        _load_kernels()
        gc.collect()
        self.baseline = memory.resident_bytes() or 0
        begin = time.perf_counter()
        model = build_model(self.settings)
        self.parameters = count_parameters(model)
        self.trainer = chosen.build(model, self.settings)
        self.setup_seconds = time.perf_counter() - begin
        self.steps_done = 0

    def ready(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "setup_seconds": self.setup_seconds,
            "baseline_bytes": self.baseline,
            "torch": torch.__version__,
        }

    def turn(self, steps: int) -> dict[str, Any]:
        """`steps` training steps: seconds and loss of each, memory and traffic of all."""
        data = [step_batches(self.settings, self.steps_done + i, self.rank) for i in range(steps)]
        sent_before = self.trainer.traffic()
        peak_is_own = memory.reset_peak()
        seconds, losses = [], []
        for batches in data:
            begin = time.perf_counter()
            loss = self.trainer.step(batches)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
        self.steps_done += steps
        return {
            "seconds": seconds,
            "losses": losses,
            "resident": self._growth(memory.resident_bytes()),
            "shared": memory.shared_bytes(),
            "peak": self._growth(memory.peak_bytes()) if peak_is_own else None,
            "sent": _difference(sent_before, self.trainer.traffic()),
            "report": self.trainer.report(),
        }

    def _growth(self, now: int | None) -> int | None:
        return None if now is None else now - self.baseline


def _difference(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    if before is None or after is None:
        return None
    return {kind: count - before.get(kind, 0) for kind, count in after.items()}
