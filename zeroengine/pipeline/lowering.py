"""From what each rank computes to everything it does: sends, receives and marks are added.

The computations are played through in time. When one ends whose result another rank needs, the send goes to the end of
the sender's list and the receive, at the same moment, to the end of the receiver's. All lists are then parts of one common
order in which a send and its receive are neighbours, so nothing waits in a circle even if both block until they meet, and
messages between two ranks have the same order at both ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zeroengine.pipeline.actions import (
    NO_MICRO,
    Action,
    Kind,
    Orders,
    Schedule,
    ScheduleError,
    gives,
    needs,
    sends_after,
)

_COSTS: Mapping[Kind, int] = MappingProxyType({Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1})


def lower(name: str, orders: Orders, placement: tuple[int, ...], micro_batches: int, trains: bool = True) -> Schedule:
    """The schedule of these computations. Raises `ScheduleError` if they are none of these stages and micro-batches, or if their
    orders wait for each other in a circle."""
    orders = _known(name, orders, placement, micro_batches)
    lists: list[list[Action]] = [[] for _ in orders]
    position = [0] * len(orders)
    waiting: dict[tuple[Kind, int, int], list[int]] = {}  # what the ranks that stand still wait for
    done: set[tuple[Kind, int, int]] = set()
    ends: list[tuple[int, int, Action]] = []  # (time, rank, action)
    firsts, lasts = _marks(orders)

    def start(rank: int, time: int) -> None:
        if position[rank] == len(orders[rank]):
            return
        action = orders[rank][position[rank]]
        for need in needs(len(placement), action):
            if need not in done:
                waiting.setdefault(need, []).append(rank)
                return
        at = (rank, position[rank])
        if at in firsts:
            lists[rank].append(Action(Kind.GATHER, action.stage, NO_MICRO))
        if at in lasts:
            lists[rank].append(Action(Kind.REDUCE, action.stage, NO_MICRO))
        lists[rank].append(action)
        position[rank] += 1
        heapq.heappush(ends, (time + _COSTS[action.kind], rank, action))

    for rank in range(len(orders)):
        start(rank, 0)
    while ends:
        time, rank, action = heapq.heappop(ends)
        done.add(gives(action))
        pair = sends_after(placement, action)
        if pair is not None:
            lists[rank].append(pair[0])
            lists[placement[pair[1].stage]].append(pair[1])
        start(rank, time)
        for other in waiting.pop(gives(action), []):
            start(other, time)
    if any(position[r] < len(order) for r, order in enumerate(orders)):
        raise ScheduleError(f"schedule '{name}': {_standstill(orders, position, waiting)}")
    if trains:
        for actions in lists:
            actions.append(Action(Kind.STEP, NO_MICRO, NO_MICRO))
    return Schedule(name, placement, micro_batches, tuple(map(tuple, lists)), trains)


def _known(name: str, orders: Any, placement: tuple[int, ...], micro_batches: int) -> Orders:
    """The orders, if each rank has one and it consists of computations that the rank can do. Somebody's own function made them."""
    ranks = max(placement) + 1
    try:
        found = tuple(map(tuple, orders))
    except TypeError as error:
        raise ScheduleError(f"schedule '{name}' is {type(orders).__name__}; it must be one list of actions for each rank") from error
    if len(found) != ranks:
        raise ScheduleError(f"schedule '{name}' has lists for {len(found)} ranks, not {ranks}")
    for rank, order in enumerate(found):
        for action in order:
            if not isinstance(action, Action) or action.kind not in _COSTS:
                raise ScheduleError(
                    f"schedule '{name}', rank {rank}: {action} is no computation; sends, receives and marks are added to lists of "
                    f"{', '.join(f'Kind.{kind.name}' for kind in _COSTS)}"
                )
            if action.stage not in range(len(placement)) or placement[action.stage] != rank:
                raise ScheduleError(f"schedule '{name}': rank {rank} has {action}, but stage {action.stage} is not on it")
            if action.micro not in range(micro_batches):
                raise ScheduleError(f"schedule '{name}': rank {rank} has {action}, but there are micro-batches 0 to {micro_batches - 1}")
    return found


def _marks(orders: Sequence[Sequence[Action]]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(rank, position) of the first forward and of the last weight gradient of each stage."""
    firsts: dict[int, tuple[int, int]] = {}
    lasts: dict[int, tuple[int, int]] = {}
    for rank, order in enumerate(orders):
        for i, action in enumerate(order):
            if action.kind is Kind.FORWARD:
                firsts.setdefault(action.stage, (rank, i))
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                lasts[action.stage] = (rank, i)
    return set(firsts.values()), set(lasts.values())


def _standstill(orders: Orders, position: list[int], waiting: Mapping[tuple[Kind, int, int], list[int]]) -> str:
    told = []
    for need, ranks in waiting.items():
        for rank in ranks:
            action = orders[rank][position[rank]]
            told.append(f"rank {rank} at {action} waits for {Action(*need)}")
    return "the order stands still: " + "; ".join(sorted(told))
