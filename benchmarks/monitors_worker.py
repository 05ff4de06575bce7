"""The job of a process in `benchmarks.monitors`: one engine, whose observers are taken off and put on between turns."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.model import build_model, count_parameters, step_batches
from benchmarks.settings import Settings


class _Bare:
    """In place of the engine's watch: as if there were nothing to observe an engine with."""

    observers: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._nothing: AbstractContextManager[None] = nullcontext()

    def phase(self, name: str, detail: str = "") -> AbstractContextManager[None]:
        return self._nothing

    def add_loss(self, loss: Any, share: float) -> None:
        return


class MonitoredJob:
    """Turns of `mode` "bare" (calls to the observers replaced by nothing), "off" (no observer) and "on" (all that run at every
    step) on the same engine, so that nothing else differs."""

    def __init__(self, settings: dict[str, Any], stage: int, packages: list[str]):
        import zeroengine

        self.settings, self.rank, self.done = Settings(**settings), int(os.environ["RANK"]), 0
        torch.set_num_threads(self.settings.threads)
        zeroengine.init_distributed("gloo", verbose=False)
        self._folder = tempfile.TemporaryDirectory()
        model = build_model(self.settings)
        self.parameters = count_parameters(model)
        self.engine = zeroengine.initialize(model=model, config=self._config(stage, packages))[0]
        self.watch, self.observers = self.engine.watch, self.engine.watch.observers

    def _config(self, stage: int, packages: list[str]) -> dict[str, Any]:
        files = {"enabled": True, "output_path": self._folder.name}
        return {
            "train_micro_batch_size_per_gpu": self.settings.micro_batch,
            "gradient_accumulation_steps": self.settings.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": self.settings.learning_rate}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10,
            "wall_clock_breakdown": True,
            "memory_breakdown": True,
            "csv_monitor": {**files, "job_name": "csv"},
            "jsonl_monitor": {**files, "job_name": "lines"},
            **{name: {**files, "job_name": name} for name in packages},
            "comms_logger": {"enabled": True},
            # one run for each rank: a rank knows its own temporary folder only
            "monitor": {"run_dir": str(Path(self._folder.name) / "run")},
        }

    def ready(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "observers": [type(o).__name__ for o in self.observers], "torch": torch.__version__}

    def turn(self, mode: str, steps: int) -> dict[str, Any]:
        self._switch(mode)
        data = [step_batches(self.settings, self.done + i, self.rank) for i in range(steps)]
        seconds, losses = [], []
        for batches in data:
            begin = time.perf_counter()
            for tokens, targets in batches:
                loss = self.engine(tokens, targets)
                self.engine.backward(loss)
                self.engine.step()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
        self.done += steps
        return {"seconds": seconds, "losses": losses}

    def _switch(self, mode: str) -> None:
        for observer in self.watch.observers:
            self.engine.mesh.fabric.unlisten(observer)
        self.watch.observers = ()
        self.engine.watch = _Bare() if mode == "bare" else self.watch
        if mode == "on":
            for observer in self.observers:
                self.watch.add(observer)
