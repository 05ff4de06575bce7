"""Where the time of a step went, and `wall_clock_breakdown`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroengine.comm.listening import Movement
from zeroengine.monitor.observer import MICRO_BATCH, MOST_WAITS, Observer, Step


@dataclass
class StepTimes:
    """Seconds of one step (or the sum of several). `phases` by name; `exposed` and `messages` are the parts of them, by phase
    (or "outside"), in which nothing was computed: waits for collectives, and for a pipeline's neighbours. `dims` splits
    `exposed` by communicator. What `wall` has beyond everything else is time outside of all phases: data, the script."""

    wall: float = 0.0
    steps: int = 0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    streams: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: StepTimes) -> None:
        self.wall += other.wall
        self.steps += other.steps
        for mine, theirs in (
            (self.phases, other.phases), (self.exposed, other.exposed), (self.messages, other.messages), (self.streams, other.streams),
        ):  # fmt: skip
            for name, seconds in theirs.items():
                mine[name] += seconds

    def split(self) -> dict[str, float]:
        """compute + exposed communication + optimizer + idle = wall. Idle: waiting for a pipeline's neighbours, and outside."""
        compute = sum(self._own(name) for name in self.phases if name != "step")
        optimizer = self._own("step")
        exposed = sum(self.exposed.values())
        return {
            "compute": compute,
            "exposed communication": exposed,
            "optimizer": optimizer,
            "idle": self.wall - compute - optimizer - exposed,
        }

    def _own(self, name: str) -> float:
        return self.phases.get(name, 0.0) - self.exposed.get(name, 0.0) - self.messages.get(name, 0.0)


class StepClock(Observer):
    """Measures every step; others read `last` in their `step_ended` (it comes before them) and `total`."""

    listens = True
    measures = True

    def __init__(self) -> None:
        self.last = StepTimes()
        self.total = StepTimes()
        self._now = StepTimes()
        self._since: float | None = None
        self._began = 0.0
        self._phase = "outside"
        self._waits: list[tuple[str, Movement]] = []

    def phase_begins(self, name: str, detail: str, now: float) -> None:
        self._since = now if self._since is None else self._since
        self._began, self._phase = now, name

    def phase_ends(self, name: str, detail: str, now: float) -> None:
        self._now.phases[name] += now - self._began
        self._phase = "outside"

    def wait_ends(self, movement: Movement) -> None:
        self._waits.append((self._phase, movement))
        if len(self._waits) >= MOST_WAITS:  # many forwards without a step
            self._settle()

    def step_ended(self, step: Step) -> None:
        self._settle()
        self._now.wall = step.ended - self._since if self._since is not None else 0.0
        self._now.steps = 1
        self._since = step.ended
        self.last, self._now = self._now, StepTimes()
        self.total.add(self.last)

    def _settle(self) -> None:
        for phase, movement in self._waits:
            seconds = movement.waited()
            if movement.is_message:
                self._now.messages[phase] += seconds
            else:
                self._now.exposed[phase] += seconds
                self._now.streams[movement.comm.name] += seconds
        self._waits.clear()


def breakdown(times: StepTimes) -> str:
    """One line: milliseconds of each phase a step, with what of it was waiting."""
    steps = max(times.steps, 1)
    parts = []
    for name in sorted(times.phases, key=lambda n: (*MICRO_BATCH, "step").index(n) if n in (*MICRO_BATCH, "step") else 9):
        waits = times.exposed.get(name, 0.0) + times.messages.get(name, 0.0)
        told = f" ({1000 * waits / steps:.1f} waiting)" if waits else ""
        parts.append(f"{name} {1000 * times.phases[name] / steps:.1f} ms{told}")
    idle = times.wall - sum(times.phases.values())
    parts.append(f"outside {1000 * max(idle, 0.0) / steps:.1f} ms")
    return ", ".join(parts)


def since(total: StepTimes, before: StepTimes) -> StepTimes:
    """What was added to `total` since it was `before`."""

    def less(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {name: seconds - b.get(name, 0.0) for name, seconds in a.items()}

    return StepTimes(
        total.wall - before.wall, total.steps - before.steps, less(total.phases, before.phases), less(total.exposed, before.exposed),
        less(total.messages, before.messages), less(total.streams, before.streams),
    )  # fmt: skip
