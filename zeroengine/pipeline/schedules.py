"""The schedules: pure functions from (ranks, micro-batches, chunks) to the order in which each rank computes.

What crosses between ranks is added by `lowering`. Another schedule is one such function under `@schedule_rule`; it can be
given wherever a name can, itself or as "package.module:function".
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zeroengine.pipeline.actions import Action, Kind, Orders, Schedule, ScheduleError
from zeroengine.pipeline.greedy import v_zero_bubble_orders
from zeroengine.pipeline.lowering import lower
from zeroengine.pipeline.placement import looped, v_shaped
from zeroengine.wording import did_you_mean

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741  (the names that the papers use)

OrderFunction = Callable[[int, int, int], Orders]
PlacementFunction = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class ScheduleRule:
    """A way to make a schedule. `orders(ranks, micro_batches, chunks)` gives what each rank computes, `placement(ranks,
    chunks)` the rank of each stage. `chunks`: the numbers of stages a rank that it works with; None is any."""

    name: str
    orders: OrderFunction
    placement: PlacementFunction = looped
    chunks: tuple[int, ...] | None = (1,)
    trains: bool = True

    @property
    def default_chunks(self) -> int:
        return self.chunks[0] if self.chunks else 2

    def build(self, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
        """The complete schedule. Raises `ScheduleError` where these numbers can not be had."""
        chunks = self.default_chunks if chunks is None else chunks
        placement = self.place(ranks, chunks)
        self._at_least_one("micro-batches", micro_batches)
        return lower(self.name, self.orders(ranks, micro_batches, chunks), placement, micro_batches, self.trains)

    def place(self, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
        """The rank of each stage. Raises `ScheduleError` where these numbers can not be had."""
        chunks = self.default_chunks if chunks is None else chunks
        self._at_least_one("pipeline ranks", ranks)
        self._at_least_one("stages a rank", chunks)
        if self.chunks is not None and chunks not in self.chunks:
            allowed = " or ".join(map(str, self.chunks))
            raise ScheduleError(f"schedule '{self.name}' has {allowed} stage(s) a rank, not {chunks}")
        placement = tuple(self.placement(ranks, chunks))
        if set(placement) != set(range(ranks)):
            raise ScheduleError(f"schedule '{self.name}' places its stages on ranks {placement}; each of 0 to {ranks - 1} must have one")
        return placement

    def _at_least_one(self, what: str, value: Any) -> None:
        if not isinstance(value, int) or value < 1:
            raise ScheduleError(f"schedule '{self.name}': {value} {what}; it is a whole number, at least 1")


def schedule_rule(
    name: str, placement: PlacementFunction = looped, chunks: tuple[int, ...] | None = (1,), trains: bool = True
) -> Callable[[OrderFunction], ScheduleRule]:
    """Makes a schedule of a function.

    @schedule_rule("mine")
    def mine(ranks, micro_batches, chunks):
        return tuple(tuple(...) for rank in range(ranks))
    """
    return lambda orders: ScheduleRule(name, orders, placement, chunks, trains)


@schedule_rule("gpipe")
def gpipe(ranks: int, micro_batches: int, chunks: int) -> Orders:
    """All forwards, then all backwards (Huang et al., 2019). Every rank holds all micro-batches."""
    return tuple(tuple(Action(kind, rank, i) for kind in (F, B) for i in range(micro_batches)) for rank in range(ranks))


@schedule_rule("1f1b")
def one_f_one_b(ranks: int, micro_batches: int, chunks: int) -> Orders:
    """Forwards only until the first gradient can come, then one of each (Narayanan et al., PipeDream-Flush, 2021). Rank r
    holds min(ranks - r, micro_batches) activations."""
    found = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order = [Action(F, rank, i) for i in range(ahead)]
        for i in range(micro_batches):
            if i + ahead < micro_batches:
                order.append(Action(F, rank, i + ahead))
            order.append(Action(B, rank, i))
        found.append(tuple(order))
    return tuple(found)


@schedule_rule("interleaved", chunks=None)
def interleaved(ranks: int, micro_batches: int, chunks: int) -> Orders:
    """1F1B over several stages a rank (Narayanan et al., Megatron-LM, 2021): micro-batches go through the chunks in rounds of
    as many as there are ranks. The bubble is divided by `chunks`, the peak of activations is higher."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise ScheduleError(
            f"schedule 'interleaved': {micro_batches} micro-batches do not divide into {rounds} rounds of equal size; give a "
            f"multiple of the {ranks} pipeline ranks"
        )
    each, total = micro_batches // rounds, micro_batches * chunks

    def at(number: int) -> tuple[int, int]:
        """(chunk, micro-batch) of a rank's forward `number`."""
        turn, within = divmod(number, each * chunks)
        return within // each, turn * each + within % each

    found = []
    for rank in range(ranks):
        forwards = [Action(F, chunk * ranks + rank, i) for chunk, i in map(at, range(total))]
        backwards = [Action(B, (chunks - 1 - chunk) * ranks + rank, i) for chunk, i in map(at, range(total))]
        ahead = min(total, (chunks - 1) * each + 2 * (ranks - 1 - rank))
        order = forwards[:ahead]
        for i in range(total):
            order += forwards[ahead + i : ahead + i + 1]
            order.append(backwards[i])
        found.append(tuple(order))
    return tuple(found)


@schedule_rule("zb-h1")
def zb_h1(ranks: int, micro_batches: int, chunks: int) -> Orders:
    """1F1B whose weight gradients fill the bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, ZB-H1). Rank r puts
    the first r weight gradients off, so that every rank holds what rank 0 of 1F1B does."""
    found = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order = [Action(F, rank, i) for i in range(ahead)]
        weights = 0
        for i in range(micro_batches):
            if i + ahead < micro_batches:
                order.append(Action(F, rank, i + ahead))
            order.append(Action(I, rank, i))
            if i >= rank:
                order.append(Action(W, rank, weights))
                weights += 1
        order += [Action(W, rank, i) for i in range(weights, micro_batches)]
        found.append(tuple(order))
    return tuple(found)


@schedule_rule("zb-v", v_shaped, (2,))
def zb_v(ranks: int, micro_batches: int, chunks: int) -> Orders:
    """Two stages a rank, down and up again, so that the first rank has the loss as well and every rank holds the same (Qi et
    al., "Pipeline Parallelism with Controllable Memory", 2024, V-ZB). At most 2 * ranks activations of half the size.

    Where there are enough micro-batches it is the paper's pattern: whoever waits for a message has something else to compute until it
    comes. With fewer an order is found by playing it through, in which a late message makes all wait."""
    if micro_batches >= 2 * ranks - 1:
        return tuple(_zb_v_rank(ranks, micro_batches, rank) for rank in range(ranks))
    return v_zero_bubble_orders(ranks, micro_batches)


def _zb_v_rank(ranks: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    below = ranks - rank
    v = _VRank((rank, 2 * ranks - 1 - rank))
    for _ in range(2 * below - 1):
        v.forward(0)
    for _ in range(rank):
        v.forward(1)
        v.forward(0)
    for _ in range(below):
        v.forward(1)
        v.input_only(1)
        v.weight()
    for i in range(micro_batches - ranks):
        if i <= micro_batches - 2 * ranks + rank:  # else all have begun
            v.forward(0)
        v.input_only(0)
        v.weight()
        v.forward(1)
        v.input_only(1)
        v.weight()
    for _ in range(rank):
        v.input_only(0)
        v.input_only(1)
    for _ in range(below):
        v.input_only(0)
        v.weight()
    v.settle()
    return tuple(v.order)


@schedule_rule("dualpipe-v", v_shaped, (2,))
def dualpipe_v(ranks: int, micro_batches: int, chunks: int) -> Orders:
    """The V-shaped half of DualPipe (DeepSeek-V3 report, 2024, section 3.2.1; cut in half by Sea AI Lab): a forward of one
    direction stands beside a backward of the other, to be overlapped. Needs 2 * ranks micro-batches."""
    if micro_batches < 2 * ranks:
        raise ScheduleError(
            f"schedule 'dualpipe-v': {micro_batches} micro-batches on {ranks} ranks; it needs at least {2 * ranks} "
            "(gradient_accumulation_steps), or choose another schedule"
        )
    return tuple(_dualpipe_v_rank(ranks, micro_batches, rank) for rank in range(ranks))


class _VRank:
    """Writes down the order of one rank with two stages; every (kind, chunk) counts its micro-batches by itself."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.order: list[Action] = []
        self._stages = stages
        self._next = {(kind, chunk): 0 for kind in "FB" for chunk in (0, 1)}
        self._owed: list[tuple[int, int]] = []

    def forward(self, chunk: int) -> None:
        self.order.append(Action(F, self._stages[chunk], self._count("F", chunk)))

    def backward(self, chunk: int) -> None:
        self.order.append(Action(B, self._stages[chunk], self._count("B", chunk)))

    def input_only(self, chunk: int) -> None:
        stage, micro = self._stages[chunk], self._count("B", chunk)
        self.order.append(Action(I, stage, micro))
        self._owed.append((stage, micro))

    def weight(self) -> None:
        """The oldest weight gradient that is owed."""
        if self._owed:
            self.order.append(Action(W, *self._owed.pop(0)))

    def settle(self) -> None:
        while self._owed:
            self.weight()

    def _count(self, kind: str, chunk: int) -> int:
        self._next[kind, chunk] += 1
        return self._next[kind, chunk] - 1


def _dualpipe_v_rank(ranks: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    below, up = ranks - rank - 1, rank + 1
    v = _VRank((rank, 2 * ranks - 1 - rank))
    for _ in range(2 * below):
        v.forward(0)
    for _ in range(up):
        v.forward(0)
        v.forward(1)
    for _ in range(below):
        v.input_only(1)
        v.weight()
        v.forward(1)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        v.forward(0)
        v.backward(1)
        v.forward(1)
        v.backward(0)
    for _ in range(below):
        v.backward(1)
        v.forward(1)
        v.backward(0)
    for i in range(up):
        # from the middle on weight gradients are put off; on odd ranks with the up-going stage, on even ones after it
        (v.input_only if i >= up // 2 + (rank + 1) % 2 else v.backward)(1)
        (v.input_only if i >= up // 2 else v.backward)(0)
    for _ in range(below):
        v.weight()
        v.input_only(0)
    v.settle()
    return tuple(v.order)


SCHEDULES: Mapping[str, ScheduleRule] = MappingProxyType(
    {rule.name: rule for rule in (gpipe, one_f_one_b, interleaved, zb_h1, zb_v, dualpipe_v)}
)
"""The training schedules by name."""


def find_rule(schedule: str | ScheduleRule) -> ScheduleRule:
    """The rule of a name, of "package.module:function", or the rule itself. Raises `ScheduleError` for anything else."""
    if isinstance(schedule, ScheduleRule):
        return schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"a schedule is a name or a function under @schedule_rule(...), not {schedule!r}")
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    if ":" not in schedule:
        hint = did_you_mean(schedule, SCHEDULES, f"it is one of {', '.join(SCHEDULES)}")
        raise ScheduleError(f"schedule '{schedule}' is not known and no 'package.module:function'; {hint}")
    module, _, name = schedule.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScheduleError(f"schedule '{schedule}': {error}") from error
    if not isinstance(found, ScheduleRule):
        raise ScheduleError(f"schedule '{schedule}' is a {type(found).__name__}; put @schedule_rule(...) on its function")
    return found


def whole_backward(schedule: Schedule) -> Schedule:
    """The schedule with every backward in one part: for stages that compute their activations again in backward. Autograd would
    make them do so for the input gradient, and then once more for each layer whose weight gradient was put off."""
    orders = tuple(
        tuple(dataclasses.replace(a, kind=B) if a.kind is I else a for a in schedule.compute(rank) if a.kind is not W)
        for rank in range(schedule.size)
    )
    return lower(schedule.name, orders, schedule.placement, schedule.micro_batches)


def forward_schedule(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """The forward-only schedule of stages that are placed already: what `eval_batch` runs."""
    orders = tuple(
        tuple(Action(F, s, i) for i in range(micro_batches) for s, at in enumerate(placement) if at == rank)
        for rank in range(max(placement) + 1)
    )
    return lower("forward", orders, placement, micro_batches, trains=False)
