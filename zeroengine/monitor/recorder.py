"""Writes the records of a run while it runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from zeroengine.comm.fabric import Fabric
from zeroengine.comm.listening import Movement
from zeroengine.monitor.alive import Alive
from zeroengine.monitor.observer import Observer, Step
from zeroengine.monitor.phases import StepClock
from zeroengine.monitor.record import RUN_FILE, rank_file
from zeroengine.monitor.sinks import number

_REST_EVERY = 100  # steps between two records of the bytes at rest


class Subject(Protocol):
    """What a recorder asks of an engine."""

    def memory_report(self) -> dict[str, int]: ...

    def run_facts(self) -> dict[str, Any]: ...

    def rank_facts(self) -> dict[str, Any]: ...


Moving = dict[tuple[str, str], tuple[int, int]]


def moved_so_far(fabric: Fabric) -> Moving:
    """(bytes sent, operations) by stream and kind since the counters were reset."""
    return {
        (comm.name, kind): (comm.traffic.bytes[kind], calls)
        for comm in fabric.communicators
        if comm.size > 1
        for kind, calls in comm.traffic.calls.items()
    }


def resident(device: torch.device) -> int:
    """Bytes that this process holds: of the device's allocator, or of the host."""
    if device.type != "cpu":
        return int(torch.accelerator.memory_allocated())
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class Recorder(Observer):
    """One rank's file in `folder`, and on rank 0 the run's. `timeline_step`: counted from now. `clock` comes before this one."""

    listens = True
    measures = True
    asks_loss = True

    def __init__(self, folder: Path, engine: Subject, fabric: Fabric, clock: StepClock, timeline_step: int, loss_every: int) -> None:
        self._engine, self._fabric, self._clock = engine, fabric, clock
        self._timeline_step, self._loss_every = timeline_step, loss_every
        folder.mkdir(parents=True, exist_ok=True)
        if fabric.rank == 0:
            (folder / RUN_FILE).write_text(json.dumps(engine.run_facts(), indent=1, default=str) + "\n")
        self._file = rank_file(folder, fabric.rank).open("a", buffering=1)
        self._offset = time.time() - time.perf_counter()  # ranks of several hosts share the time of day
        self._steps = 0
        self._before = moved_so_far(fabric)
        self._told: list[Any] = []
        self._traced = _Traced(self._sample) if timeline_step == 1 else None
        self._kept: _Kept | None = None
        self._write("start", **engine.rank_facts())

    # --- the step whose timeline is kept ----------------------------------------------------------------------------

    def phase_begins(self, name: str, detail: str, now: float) -> None:
        if self._traced is not None:
            self._traced.begins(name, detail, now)
        if self._kept is not None:
            self._kept.begins(name)

    def phase_ends(self, name: str, detail: str, now: float) -> None:
        if self._kept is not None:
            self._kept.ends()
        if self._traced is not None:
            self._traced.ends(now)

    def wait_ends(self, movement: Movement) -> None:
        if self._traced is not None:
            self._traced.moved(movement, time.perf_counter())

    def _sample(self) -> tuple[int, dict[str, int]]:
        return resident(self._fabric.device), self._engine.memory_report()

    # --- every step -------------------------------------------------------------------------------------------------

    def step_ended(self, step: Step) -> None:
        self._steps += 1
        times = self._clock.last
        line: dict[str, Any] = {
            "number": step.number, "samples": step.samples, "applied": step.applied, "norm": number(step.norm), "wall": times.wall,
            "resident": resident(self._fabric.device), "split": times.split(), "phases": dict(times.phases),
            "streams": dict(times.streams),
        }  # fmt: skip
        if step.number % self._loss_every == 0:
            loss, experts = step.loss, step.experts
            line["loss"] = None if loss is None else number(loss)
            if experts:
                line["experts"] = {
                    name: {"load": list(e.load), "dropped": e.dropped, "imbalance": e.imbalance, "skew": e.skew, "entropy": e.entropy}
                    for name, e in experts.items()
                }
        now = moved_so_far(self._fabric)
        moved = _difference(now, self._before)
        self._before = now
        if moved != self._told:
            self._told = line["moved"] = moved
        self._write("step", **line)
        if self._kept is not None:
            self._write("kept", number=step.number, activations=self._kept.most)
            self._kept = None
        if self._traced is not None:
            self._write("timeline", **self._traced.record(step.number, self._offset))
            self._traced, self._kept = None, _Kept()
        elif self._steps + 1 == self._timeline_step:
            self._traced = _Traced(self._sample)
        if self._steps in (1, self._timeline_step) or self._steps % _REST_EVERY == 0:
            self.rest()

    def rest(self) -> None:
        """Records the bytes that are held now, between steps."""
        held = resident(self._fabric.device)
        self._write("rest", steps=self._steps, resident=held, memory=self._engine.memory_report())

    def close(self) -> None:
        self.rest()
        self._file.close()

    @property
    def path(self) -> Path:
        return Path(self._file.name)

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")


def _difference(now: Moving, before: Moving) -> list[Any]:
    found = []
    for (stream, kind), (sent, calls) in sorted(now.items()):
        old_sent, old_calls = before.get((stream, kind), (0, 0))
        if calls < old_calls:  # the counters were reset meanwhile
            old_sent = old_calls = 0
        if calls > old_calls:
            found.append([stream, kind, sent - old_sent, calls - old_calls])
    return found


class _Kept:
    """The most bytes that tensors made in forward and backward took at the end of one of them: what a step keeps for backward. Looking at
    every operation makes that one step slower."""

    def __init__(self) -> None:
        self.most = 0
        self._alive = Alive()
        self._looks = False

    def begins(self, name: str) -> None:
        if name != "step":
            self._alive.__enter__()
            self._looks = True

    def ends(self) -> None:
        if self._looks:
            self._alive.__exit__(None, None, None)
            self.most = max(self.most, self._alive.alive())
            self._looks = False


class _Traced:
    """One step in full. `sample` gives the bytes that are held: in all, and by kind."""

    def __init__(self, sample: Callable[[], tuple[int, Mapping[str, int]]]) -> None:
        self._sample = sample
        self._spans: list[tuple[str, str, str, float, float]] = []
        self._memory: list[tuple[float, int, Mapping[str, int]]] = []
        self._open: tuple[str, str, float] | None = None
        self._moved: list[tuple[Movement, float]] = []

    def begins(self, name: str, detail: str, now: float) -> None:
        self._open = name, detail, now
        self._look(now)

    def ends(self, now: float) -> None:
        if self._open is not None:
            name, detail, start = self._open
            self._spans.append(("phase", name, detail, start, now))
            self._open = None
        self._look(now)

    def moved(self, movement: Movement, now: float) -> None:
        self._moved.append((movement, now))
        if not movement.is_message:
            self._look(now)

    def _look(self, now: float) -> None:
        held, kinds = self._sample()
        self._memory.append((now, held, dict(kinds)))

    def record(self, number_of_step: int, offset: float) -> dict[str, Any]:
        for m, ended in self._moved:
            blocked = m.waited()
            if blocked > 0:
                self._spans.append(("wait", m.kind, f"{m.comm.name}: {m.subject}", ended - blocked, ended))
            if m.began is not None and m.ended is not None:
                self._spans.append(("move", m.kind, f"{m.comm.name}: {m.subject}", m.began, m.ended))
        spans = [[*words, start + offset, end + offset] for *words, start, end in sorted(self._spans, key=lambda s: s[3])]
        return {"number": number_of_step, "spans": spans, "memory": [[t + offset, held, kinds] for t, held, kinds in self._memory]}
