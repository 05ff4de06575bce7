"""Plays a schedule through with given costs: when each rank does what, how much it waits, how much it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zeroengine.pipeline.actions import COMPUTE, Action, Kind, Schedule, gives, needs

Time = float


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch in one stage, in any unit. `backward` None is input + weight. `message`: from the end of the
    computation to when the other rank can use the result. `of_stage` multiplies the costs of a stage."""

    forward: Time = 1.0
    input: Time = 1.0
    weight: Time = 1.0
    backward: Time | None = None
    message: Time = 0.0
    of_stage: Callable[[int], float] = field(default=lambda stage: 1.0)

    def time(self, action: Action) -> Time:
        whole = self.input + self.weight if self.backward is None else self.backward
        base = {Kind.FORWARD: self.forward, Kind.BACKWARD: whole, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}
        return base[action.kind] * self.of_stage(action.stage)


@dataclass(frozen=True)
class Span:
    """A computation on a rank between two times."""

    rank: int
    action: Action
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """What happened, simulated or measured. Times count from the start of the step."""

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def duration(self) -> Time:
        """From the first computation on any rank to the last."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do not compute."""
        total = self.duration * self.schedule.size
        return 1.0 - sum(s.end - s.start for s in self.spans) / total if total else 0.0

    def peak_memory(self, rank: int, activation: Callable[[int], float] = lambda stage: 1.0) -> float:
        """The most that activations of this rank take at once; `activation(stage)` is what one forward leaves."""
        held = most = 0.0
        for span in self.spans:
            if span.rank != rank:
                continue
            if span.action.kind is Kind.FORWARD:
                held += activation(span.action.stage)
                most = max(most, held)
            elif span.action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                held -= activation(span.action.stage)
        return most


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of a schedule (checked before: see `checks.check`) with messages that overlap computation."""
    costs = costs or Costs()
    at, clock = [0] * schedule.size, [0.0] * schedule.size
    ready: dict[tuple[Kind, int, int], Time] = {}
    spans: list[Span] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind in COMPUTE:
                    wanted = needs(schedule.stages, action)
                    if any(need not in ready for need in wanted):
                        break
                    travelled = [ready[n] + costs.message * (schedule.placement[n[1]] != rank) for n in wanted]
                    start = max([clock[rank], *travelled])
                    clock[rank] = start + costs.time(action)
                    ready[gives(action)] = clock[rank]
                    spans.append(Span(rank, action, start, clock[rank]))
                at[rank] += 1
                moved = True
    spans.sort(key=lambda s: (s.start, s.rank, s.end))
    return Timeline(schedule, tuple(spans))
