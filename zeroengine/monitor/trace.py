"""Traces of torch.profiler whose ranges say which phase it was and which bucket moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from zeroengine.comm.listening import Movement
from zeroengine.config.monitoring import TorchProfilerSection
from zeroengine.logging import logger
from zeroengine.monitor.observer import Observer, Step


class TorchTrace(Observer):
    """Ranges: the phases ("ze forward"), the operations of the communicators in the thread that moves the data ("all_gather
    params: h.0.weight .. h.1.bias"), and the waits for them ("wait all_gather params: ..."). `start` and `stop` make the trace,
    which goes to `folder/rank-<N>.json`."""

    listens = True

    def __init__(self, folder: Path, rank: int, options: dict[str, Any]) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._options = options
        self._phases: list[record_function] = []
        self._ranges: dict[tuple[str, int], record_function] = {}
        self.profiler: profile | None = None

    @property
    def path(self) -> Path:
        return self._path

    def start(self) -> None:
        options = dict(self._options)
        # Data of CPU tensors move in threads of the communicators.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler = profile(**{"experimental_config": config, **options})
        self.profiler.start()

    def stop(self) -> None:
        """Ends the trace and writes it."""
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            self._close_ranges()
            profiler.stop()
            profiler.export_chrome_trace(str(self._path))
            logger.info("trace of torch.profiler: %s", self._path)

    def phase_begins(self, name: str, detail: str, now: float) -> None:
        if self.profiler is not None:
            self._phases.append(_entered(f"ze {name}{' ' + detail if detail else ''}"))

    def phase_ends(self, name: str, detail: str, now: float) -> None:
        if self._phases:
            self._phases.pop().__exit__(None, None, None)

    @property
    def hears_runs(self) -> bool:
        return self.profiler is not None

    def run_begins(self, movement: Movement) -> None:
        self._open("run", movement, _told(movement))

    def run_ends(self, movement: Movement) -> None:
        self._shut("run", movement)

    def wait_begins(self, movement: Movement) -> None:
        self._open("wait", movement, f"wait {_told(movement)}")

    def wait_ends(self, movement: Movement) -> None:
        self._shut("wait", movement)

    def close(self) -> None:
        """Without `stop` before it (an error), the trace is given up."""
        self._close_ranges()
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None

    def _open(self, what: str, movement: Movement, name: str) -> None:
        if self.profiler is not None:
            self._ranges[what, id(movement)] = _entered(name)

    def _shut(self, what: str, movement: Movement) -> None:
        opened = self._ranges.pop((what, id(movement)), None)
        if opened is not None:
            opened.__exit__(None, None, None)

    def _close_ranges(self) -> None:
        while self._phases:
            self._phases.pop().__exit__(None, None, None)
        self._ranges.clear()


class ScheduledTrace(TorchTrace):
    """The steps that the section `torch_profiler` names, counted from the start of the engine."""

    def __init__(self, section: TorchProfilerSection, rank: int) -> None:
        options = {"record_shapes": section.record_shapes, "profile_memory": section.profile_memory, "with_stack": section.with_stack}
        super().__init__(Path(section.output_path), rank, options)
        self._first, self._count = section.start_step, section.steps
        self._ended = 0
        if self._first == 1:
            self.start()

    def step_ended(self, step: Step) -> None:
        self._ended += 1
        if self._ended == self._first - 1:
            self.start()
        elif self._ended == self._first + self._count - 1:
            self.stop()


def _entered(name: str) -> record_function:
    opened = record_function(name)
    opened.__enter__()
    return opened


def _told(movement: Movement) -> str:
    return f"{movement.kind} {movement.comm.name}: {movement.subject}"
