"""The order of a V-shaped zero-bubble schedule, found by playing it through with equal costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroengine.pipeline.actions import Action, Kind, Orders, ScheduleError


@dataclass
class _Rank:
    stages: tuple[int, int]
    limit: int
    order: list[Action] = field(default_factory=list)
    forwards: list[int] = field(default_factory=lambda: [0, 0])
    inputs: list[int] = field(default_factory=lambda: [0, 0])
    owed: list[Action] = field(default_factory=list)
    live: int = 0


def v_zero_bubble_orders(ranks: int, micro_batches: int) -> Orders:
    """Time goes by in steps, each of one forward, input gradient or weight gradient. Every rank takes what is ready: an
    input gradient first (others wait for it), else a forward as far as the memory of 2 * ranks activations reaches, the
    stage nearer to the loss first, else a weight gradient."""
    state = [_Rank((r, 2 * ranks - 1 - r), 2 * ranks) for r in range(ranks)]
    done: dict[tuple[Kind, int, int], int] = {}  # when it was finished
    left, time = 6 * ranks * micro_batches, 0
    while left:
        chosen = [(rank, _choose(rank, done, time, ranks, micro_batches)) for rank in state]
        started = [(rank, action) for rank, action in chosen if action is not None]
        for rank, action in started:
            _take(rank, action)
            done[action.kind, action.stage, action.micro] = time + 1
        left -= len(started)
        if not started:
            numbers = f"{ranks} ranks, {micro_batches} micro-batches"
            raise ScheduleError(f"schedule 'zb-v' stands still with {left} actions left ({numbers})")
        time += 1
    return tuple(tuple(rank.order) for rank in state)


def _choose(rank: _Rank, done: dict[tuple[Kind, int, int], int], time: int, ranks: int, micro_batches: int) -> Action | None:
    last = 2 * ranks - 1

    def ready(kind: Kind, stage: int, micro: int) -> bool:
        return done.get((kind, stage, micro), time + 1) <= time

    for chunk in (1, 0):
        stage, micro = rank.stages[chunk], rank.inputs[chunk]
        if micro < rank.forwards[chunk] and (stage == last or ready(Kind.INPUT, stage + 1, micro)):
            if stage != last or ready(Kind.FORWARD, stage, micro):
                return Action(Kind.INPUT, stage, micro)
    for chunk in (1, 0):
        stage, micro = rank.stages[chunk], rank.forwards[chunk]
        # the down-going stage leaves room for the up-going one, without which nothing would ever be freed
        room = rank.live < rank.limit - (1 - chunk)
        if micro < micro_batches and room and (stage == 0 or ready(Kind.FORWARD, stage - 1, micro)):
            return Action(Kind.FORWARD, stage, micro)
    return rank.owed[0] if rank.owed else None


def _take(rank: _Rank, action: Action) -> None:
    chunk = rank.stages.index(action.stage)
    rank.order.append(action)
    if action.kind is Kind.FORWARD:
        rank.forwards[chunk] += 1
        rank.live += 1
    elif action.kind is Kind.INPUT:
        rank.inputs[chunk] += 1
        rank.owed.append(Action(Kind.WEIGHT, action.stage, action.micro))
    else:
        rank.owed.remove(action)
        rank.live -= 1
