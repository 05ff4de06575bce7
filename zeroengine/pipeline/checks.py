"""Whether a schedule may be run: it is complete, in order, and never stands still; and what it holds at most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zeroengine.pipeline.actions import (
    COMPUTE,
    MARKS,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Message,
    Schedule,
    ScheduleError,
    gives,
    needs,
)


@dataclass(frozen=True)
class Checked:
    """A schedule that may be run. `peak_live[rank]`: the most forwards whose activations the rank holds at once (until their
    BACKWARD or WEIGHT); `peak_received[rank]`: the most messages that were asked for and not used yet."""

    schedule: Schedule
    peak_live: tuple[int, ...]
    peak_received: tuple[int, ...]


def check(schedule: Schedule) -> Checked:
    """Raises `ScheduleError` with the rank, the action and the reason if the schedule must not be run."""
    _complete(schedule)
    for rank in range(schedule.size):
        _ordered(schedule, rank)
    _same_message_order(schedule)
    _runs_through(schedule, blocking=False)
    _runs_through(schedule, blocking=True)
    peaks = [_peaks(schedule, rank) for rank in range(schedule.size)]
    return Checked(schedule, tuple(live for live, _ in peaks), tuple(received for _, received in peaks))


def _fail(schedule: Schedule, what: str) -> ScheduleError:
    return ScheduleError(f"schedule '{schedule.name}' ({schedule.size} ranks, {schedule.micro_batches} micro-batches): {what}")


def _complete(schedule: Schedule) -> None:
    """Every stage does every micro-batch once, where it lies; every crossing has one send and one receive."""
    if set(schedule.placement) != set(range(schedule.size)):
        raise _fail(schedule, f"stages are placed on ranks {sorted(set(schedule.placement))} of {schedule.size}")
    found: Counter[tuple[Kind, int, int]] = Counter()
    whole: set[tuple[int, int]] = set()
    messages: dict[bool, Counter[Message]] = {True: Counter(), False: Counter()}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind is Kind.STEP:
                continue
            if not 0 <= action.stage < schedule.stages or schedule.placement[action.stage] != rank:
                raise _fail(schedule, f"rank {rank} has {action}, but stage {action.stage} is not on it")
            if action.kind in COMPUTE:
                found[gives(action)] += 1
                if action.kind is Kind.BACKWARD:
                    whole.add((action.stage, action.micro))
                    found[Kind.WEIGHT, action.stage, action.micro] += 1
            elif action.kind not in MARKS:
                if action.stage + _towards(action) not in range(schedule.stages):
                    raise _fail(schedule, f"rank {rank}: {action} has no stage at its other end")
                messages[action.kind in SENDS][schedule.message(action)] += 1
    kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if schedule.trains else (Kind.FORWARD,)
    wanted = {(kind, s, i) for kind in kinds for s in range(schedule.stages) for i in range(schedule.micro_batches)}
    for key in sorted(set(found) | wanted, key=lambda k: (k[1], k[2], k[0].value)):
        times = 1 if key in wanted else 0
        if found[key] != times:
            action = Action(Kind.BACKWARD if key[1:] in whole and key[0] is Kind.INPUT else key[0], key[1], key[2])
            raise _fail(schedule, f"{action} is there {found[key]} times instead of {times}")
    crossings = set(schedule.crossings())
    for sends, done in ((True, "sent"), (False, "received")):
        for message in crossings | set(messages[sends]):
            count, wants = messages[sends][message], int(message in crossings)
            if count != wants:
                raise _fail(schedule, f"the {message} is {done} {count} times instead of {wants}")
    _marked(schedule)


def _towards(action: Action) -> int:
    return 1 if action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT) else -1


def _marked(schedule: Schedule) -> None:
    """One REDUCE a stage, directly in front of its last weight gradient; one STEP at the end."""
    if not schedule.trains:
        return
    for rank, actions in enumerate(schedule.ranks):
        if [a.kind for a in actions].count(Kind.STEP) != 1 or actions[-1].kind is not Kind.STEP:
            raise _fail(schedule, f"rank {rank} has to end with its only step")
        for stage in schedule.stages_of(rank):
            own = [a.kind for a in actions if a.stage == stage and a.kind in (Kind.REDUCE, Kind.WEIGHT, Kind.BACKWARD)]
            if own.count(Kind.REDUCE) != 1 or own[-2:-1] != [Kind.REDUCE]:
                what = f"rank {rank}: reduce({stage}) has to stand once, before the last weight gradient of the stage"
                raise _fail(schedule, what)


def _ordered(schedule: Schedule, rank: int) -> None:
    """On this rank everything comes after what it needs, and messages on the right side of what they carry."""
    done: set[tuple[Kind, int, int]] = set()
    received: set[Message] = set()
    for action in schedule.ranks[rank]:
        if action.kind in COMPUTE:
            for need in needs(schedule.stages, action):
                source = schedule.placement[need[1]]
                if source == rank and need not in done:
                    raise _fail(schedule, f"rank {rank}: {action} comes before {Action(*need)}, which it needs")
                if source != rank:
                    message = Message(source, rank, action.stage, action.micro, need[0] is Kind.INPUT)
                    if message not in received:
                        raise _fail(schedule, f"rank {rank}: {action} comes before the receive of the {message}")
            done.add(gives(action))
        elif action.kind in SENDS:
            kind = Kind.FORWARD if action.kind is Kind.SEND_ACTIVATION else Kind.INPUT
            if (kind, action.stage, action.micro) not in done:
                raise _fail(schedule, f"rank {rank}: {action} comes before what it sends is computed")
        elif action.kind in RECEIVES:
            received.add(schedule.message(action))


def _same_message_order(schedule: Schedule) -> None:
    """Messages between two ranks are received in the order in which they are sent: they travel on one ordered stream."""
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind in SENDS or action.kind in RECEIVES:
                message = schedule.message(action)
                table = sent if action.kind in SENDS else received
                table.setdefault((message.src, message.dst), []).append(message)
    for (src, dst), order in sent.items():
        for ours, theirs in zip(order, received[src, dst], strict=True):
            if ours != theirs:
                raise _fail(schedule, f"rank {src} sends the {ours} where rank {dst} receives the {theirs}")


def _runs_through(schedule: Schedule, blocking: bool) -> None:
    """Plays the lists through. Blocking: a send and its receive wait until both ranks have come to them. Otherwise only a
    computation waits, for the message it needs."""
    at = [0] * schedule.size
    done: set[tuple[Kind, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind in COMPUTE:
                    if not all(need in done for need in needs(schedule.stages, action)):
                        break
                    done.add(gives(action))
                elif blocking and (action.kind in SENDS or action.kind in RECEIVES):
                    message = schedule.message(action)
                    other = message.dst if action.kind in SENDS else message.src
                    peer = schedule.ranks[other][at[other]] if at[other] < len(schedule.ranks[other]) else None
                    opposite = RECEIVES if action.kind in SENDS else SENDS
                    if peer is None or peer.kind not in opposite or schedule.message(peer) != message:
                        break
                    at[other] += 1
                at[rank] += 1
                moved = True
    stuck = [f"rank {r} at {schedule.ranks[r][i]}" for r, i in enumerate(at) if i < len(schedule.ranks[r])]
    if stuck:
        how = "blocking" if blocking else "asynchronous"
        raise _fail(schedule, f"stands still with {how} messages: {', '.join(stuck)} wait for each other")


def _peaks(schedule: Schedule, rank: int) -> tuple[int, int]:
    live = received = most_live = most_received = 0
    for action in schedule.ranks[rank]:
        if action.kind is Kind.FORWARD:
            live += 1
        if action.kind in RECEIVES:
            received += 1
        elif action.kind in COMPUTE and action.kind is not Kind.WEIGHT:
            received -= _uses_message(schedule, rank, action)
        most_live, most_received = max(most_live, live), max(most_received, received)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            live -= 1
    return (most_live if schedule.trains else min(most_live, 1)), most_received


def _uses_message(schedule: Schedule, rank: int, action: Action) -> int:
    return sum(schedule.placement[need[1]] != rank for need in needs(schedule.stages, action))
