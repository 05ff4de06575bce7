"""The words of a pipeline schedule.

A *stage* is a consecutive part of the model; stages are numbered from the input to the loss. A *rank* of the pipeline holds
one or more stages (its chunks, or virtual stages); which, the schedule's placement says. A *schedule* is one list of
actions for each rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from zeroengine.errors import ConfigError


class ScheduleError(ConfigError):
    """A schedule that can not be made for these numbers, or that must not be run; the message says why."""


class Kind(enum.Enum):
    """What an action does with (stage, micro-batch)."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of the input and of the weights at once
    INPUT = "I"  # gradients of the stage's input only
    WEIGHT = "W"  # gradients of the weights, some time after INPUT
    SEND_ACTIVATION = "SA"  # the output of the stage, to the next one
    RECV_ACTIVATION = "RA"  # the input of the stage, from the one before
    SEND_GRADIENT = "SG"  # the gradient of the stage's input, to the one before
    RECV_GRADIENT = "RG"  # the gradient of the stage's output, from the next one
    GATHER = "gather"  # the values of the stage's weights are needed soon
    REDUCE = "reduce"  # the next weight gradient of the stage is its last: it may be reduced over data-parallel ranks
    STEP = "step"  # all gradients of this rank are there


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT})
MARKS = frozenset({Kind.GATHER, Kind.REDUCE, Kind.STEP})
NO_MICRO = -1
"""Micro-batch of an action that belongs to the whole step."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. `micro` is `NO_MICRO` for marks, and so is `stage` for STEP."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        if self.kind in MARKS:
            return self.kind.value if self.kind is Kind.STEP else f"{self.kind.value}({self.stage})"
        return f"{self.kind.value}{self.micro}@{self.stage}"


@dataclass(frozen=True)
class Message:
    """What crosses from rank `src` to rank `dst`: the activation of `micro` into `stage`, or the gradient of the output of
    `stage`. `stage` is the receiving one."""

    src: int
    dst: int
    stage: int
    micro: int
    gradient: bool

    def __str__(self) -> str:
        what = "gradient for the output of" if self.gradient else "activation into"
        return f"{what} stage {self.stage}, micro-batch {self.micro}"


Orders = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """What each rank does in one step, in order. `placement[stage]` is the rank that holds the stage; `trains` is False for
    a forward-only schedule. Immutable, and equal wherever it is made from the same numbers."""

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    ranks: Orders
    trains: bool = True

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, at in enumerate(self.placement) if at == rank)

    def compute(self, rank: int) -> tuple[Action, ...]:
        """The actions of a rank that compute."""
        return tuple(a for a in self.ranks[rank] if a.kind in COMPUTE)

    def message(self, action: Action) -> Message:
        """What a send or a receive moves."""
        forward = action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
        sends = action.kind in SENDS
        step = 1 if forward else -1
        source = action.stage if sends else action.stage - step
        target = source + step
        return Message(self.placement[source], self.placement[target], target, action.micro, not forward)

    def crossings(self) -> Iterator[Message]:
        """Every message that the placement asks for."""
        for below in range(self.stages - 1):
            a, b = self.placement[below], self.placement[below + 1]
            if a == b:
                continue
            for micro in range(self.micro_batches):
                yield Message(a, b, below + 1, micro, False)
                if self.trains:
                    yield Message(b, a, below, micro, True)


def sends_after(placement: tuple[int, ...], action: Action) -> tuple[Action, Action] | None:
    """The send that follows a computation and the receive it meets; None where nothing leaves the rank."""
    last = len(placement) - 1
    if action.kind is Kind.FORWARD and action.stage < last and placement[action.stage] != placement[action.stage + 1]:
        return (
            Action(Kind.SEND_ACTIVATION, action.stage, action.micro),
            Action(Kind.RECV_ACTIVATION, action.stage + 1, action.micro),
        )
    backward = action.kind in (Kind.BACKWARD, Kind.INPUT)
    if backward and action.stage > 0 and placement[action.stage] != placement[action.stage - 1]:
        return (
            Action(Kind.SEND_GRADIENT, action.stage, action.micro),
            Action(Kind.RECV_GRADIENT, action.stage - 1, action.micro),
        )
    return None


def needs(stages: int, action: Action) -> tuple[tuple[Kind, int, int], ...]:
    """What must be done before `action`, on whatever rank: (kind, stage, micro-batch). For the gradient of an output the
    kind is INPUT, which stands for BACKWARD as well: see `gives`."""
    kind, stage, micro = action.kind, action.stage, action.micro
    if kind is Kind.FORWARD:
        return ((kind, stage - 1, micro),) if stage else ()
    if kind is Kind.WEIGHT:
        return ((Kind.INPUT, stage, micro),)
    own = (Kind.FORWARD, stage, micro)
    return (own,) if stage == stages - 1 else (own, (Kind.INPUT, stage + 1, micro))


def gives(action: Action) -> tuple[Kind, int, int]:
    """What `needs` calls that which `action` does."""
    kind = Kind.INPUT if action.kind is Kind.BACKWARD else action.kind
    return kind, action.stage, action.micro
