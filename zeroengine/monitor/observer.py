"""The one interface between the engine and whatever watches it.

An engine runs its work in *phases* and ends each update with a *step*. Observers are told of both, and, if they `listen`, of
every operation of the communicators. Without observers a phase is two assignments and nothing is hooked anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import TracebackType

import torch

from zeroengine.comm.fabric import Fabric
from zeroengine.comm.listening import Listener
from zeroengine.comm.together import in_turn
from zeroengine.moe.statistics import LayerStatistics

MICRO_BATCH = ("forward", "backward")
"""Phases that compute gradients; the others are "step" and what a user names."""

MOST_WAITS = 4096
"""Operations that an observer keeps before it adds them up."""


@dataclass(frozen=True)
class Step:
    """An update that ended: its number, the samples and skipped steps so far, the norm of the gradients before clipping, whether
    it was applied, the learning rates with which it was made (of each parameter group), the loss scale (None without fp16)."""

    number: int
    samples: int
    norm: float
    applied: bool
    skipped: int
    rates: tuple[float, ...]
    loss_scale: float | None
    ended: float  # seconds of time.perf_counter
    find_loss: Callable[[], float | None] = field(repr=False, default=lambda: None)
    find_experts: Callable[[], Mapping[str, LayerStatistics]] = field(repr=False, default=dict)

    @cached_property
    def loss(self) -> float | None:
        """Mean over the step's micro-batches and the ranks that read different data; None if the engine did not see it (a plain
        `loss.backward()`). Collective."""
        return self.find_loss()

    @cached_property
    def experts(self) -> Mapping[str, LayerStatistics]:
        """Of every layer with experts, of all pipeline stages. Collective."""
        return self.find_experts()


class Observer(Listener):
    """Hears of phases and steps; the base does nothing. Observers are made from the configuration, alike on all ranks, and are
    called in the same order: `step_ended` may take part in collectives, the others may not.

    `listens`: also of the communicators' operations. `measures`: times must be those of the device, which is waited for at both
    ends of a phase where it runs behind the host. `asks_loss`: reads `Step.loss`.
    """

    listens = False
    measures = False
    asks_loss = False

    def phase_begins(self, name: str, detail: str, now: float) -> None:
        """`detail` tells phases of one name apart (a stage and a micro-batch of a pipeline). `now`: of time.perf_counter."""

    def phase_ends(self, name: str, detail: str, now: float) -> None:
        """Also after an error."""

    def step_ended(self, step: Step) -> None:
        """After an update, applied or skipped."""

    def close(self) -> None:
        """The engine is destroyed, or the observer was removed."""


class Watch:
    """Calls the observers of one engine. `explain` is given the phase and the error that ended it, and returns another to raise
    in its place, or None."""

    def __init__(self, fabric: Fabric, explain: Callable[[str, BaseException], BaseException | None]) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.running: str | None = None
        self._fabric = fabric
        self._explain = explain
        self._waits = self._adds = False
        self._loss: torch.Tensor | None = None

    def add(self, observer: Observer) -> None:
        self.observers = (*self.observers, observer)
        self._changed()
        if observer.listens:
            self._fabric.listen(observer)

    def remove(self, observer: Observer) -> None:
        self.observers = tuple(other for other in self.observers if other is not observer)
        self._changed()
        if observer.listens:
            self._fabric.unlisten(observer)
        observer.close()

    def close(self) -> None:
        """Removes all observers, the last first, also after one that fails, and lets go of the engine."""
        self._explain = _nothing
        in_turn(*(partial(self.remove, observer) for observer in reversed(self.observers)))

    def phase(self, name: str, detail: str = "") -> Phase:
        """A context in which the engine does `name`. A phase inside another (a forward that backward runs again) is part of it."""
        return Phase(self, name, detail)

    def add_loss(self, loss: torch.Tensor, share: float) -> None:
        """A micro-batch had this loss, which counts `share` in the step's."""
        if self._adds:
            part = loss.detach().float() * share
            self._loss = part if self._loss is None else self._loss + part

    def take_loss(self) -> float | None:
        """This rank's loss since the last call; None if there was none."""
        loss, self._loss = self._loss, None
        return None if loss is None else float(loss)

    def step_ended(self, step: Step) -> None:
        for observer in self.observers:
            observer.step_ended(step)
        self._loss = None

    def explained(self, name: str, error: BaseException) -> BaseException | None:
        return self._explain(name, error)

    def begins(self, name: str, detail: str) -> None:
        now = clock(self._waits)
        for observer in self.observers:
            observer.phase_begins(name, detail, now)

    def ends(self, name: str, detail: str) -> None:
        now = clock(self._waits)
        for observer in reversed(self.observers):
            observer.phase_ends(name, detail, now)

    def _changed(self) -> None:
        self._waits = self._fabric.device.type != "cpu" and any(o.measures for o in self.observers)
        self._adds = any(o.asks_loss for o in self.observers)


class Phase:
    """See `Watch.phase`."""

    __slots__ = ("_watch", "_name", "_detail", "_outer")

    def __init__(self, watch: Watch, name: str, detail: str) -> None:
        self._watch, self._name, self._detail = watch, name, detail
        self._outer = False

    def __enter__(self) -> None:
        watch = self._watch
        self._outer = watch.running is None
        if self._outer:
            watch.running = self._name
            if watch.observers:
                watch.begins(self._name, self._detail)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._outer:
            return
        watch = self._watch
        watch.running = None
        if watch.observers:
            watch.ends(self._name, self._detail)
        if error is not None:
            other = watch.explained(self._name, error)
            if other is not None:
                raise other from error


def clock(waits: bool) -> float:
    """`time.perf_counter`, where it `waits` when the device has done all that was begun."""
    if waits:
        torch.accelerator.synchronize()
    return time.perf_counter()


def _nothing(name: str, error: BaseException) -> None:
    return None
