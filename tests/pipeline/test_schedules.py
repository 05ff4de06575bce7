"""Schedules as data: every one passes the checker, broken ones are refused with the reason, and simulation equals the
formulas and what torch's own schedules come to."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine.launcher.cli import main
from zeroengine.pipeline.actions import Action, Kind, Schedule, ScheduleError
from zeroengine.pipeline.checks import check
from zeroengine.pipeline.draw import as_text, as_trace
from zeroengine.pipeline.lowering import lower
from zeroengine.pipeline.schedules import SCHEDULES, find_rule, forward_schedule, schedule_rule, whole_backward
from zeroengine.pipeline.simulate import Costs, simulate


def legal(name: str, ranks: int, micro: int, chunks: int) -> bool:
    if name == "interleaved":
        return micro % max(1, micro // ranks) == 0
    if name in ("zb-v", "dualpipe-v"):
        return chunks == 2 and (name == "zb-v" or micro >= 2 * ranks)
    return chunks == 1


def ideal_bubble(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> float | None:
    """Share of idle time by formula, for equal stages and free messages: (P-1)/(m+P-1) for GPipe and 1F1B; for interleaved
    the idle time is divided by the chunks, (P-1)/(v m + P-1). None where the formula depends on the costs."""
    if name in ("gpipe", "1f1b"):
        return (ranks - 1) / (micro_batches + ranks - 1)
    if name == "interleaved":
        return (ranks - 1) / (chunks * micro_batches + ranks - 1)
    return None


def verify(name: str, ranks: int, micro: int, chunks: int) -> None:
    rule = SCHEDULES[name]
    if not legal(name, ranks, micro, chunks):
        with pytest.raises(ScheduleError):
            rule.build(ranks, micro, chunks)
        return
    schedule = rule.build(ranks, micro, chunks)
    checked = check(schedule)
    timeline = simulate(schedule)
    expected = ideal_bubble(name, ranks, micro, chunks)
    if expected is not None and (name != "interleaved" or micro % ranks == 0):
        assert timeline.bubble == pytest.approx(expected, abs=1e-9)
    if name == "1f1b":
        assert checked.peak_live == tuple(min(ranks - r, micro) for r in range(ranks))
    if name == "zb-h1":
        assert max(checked.peak_live) == min(ranks, micro)
        if micro >= ranks:
            assert timeline.duration == pytest.approx(3 * micro + ranks - 1)  # 1F1B: 3 (m + P - 1)
    if name == "zb-v":
        assert max(checked.peak_live) <= 2 * ranks
        # no longer than the same two half-stages a rank in 1F1B, and with enough micro-batches much shorter
        assert timeline.duration <= 2 * 3 * (micro + ranks - 1)
        if micro >= 2 * ranks - 1:
            assert timeline.duration == pytest.approx(6 * micro + ranks - 1)
    for rank in range(ranks):
        assert checked.peak_live[rank] == timeline.peak_memory(rank)


CASES = [(n, p, m, v) for n in SCHEDULES for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 8) for v in (1, 2, 3)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_small_ones_exhaustively(name: str) -> None:
    for case in CASES:
        if case[0] == name:
            verify(*case)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_large_ones_by_sample(name: str, ranks: int, micro: int, chunks: int) -> None:
    if name == "interleaved":
        micro = max(1, micro // ranks) * ranks if micro >= ranks else micro
    elif name == "dualpipe-v":
        micro, chunks = max(micro, 2 * ranks), 2
    else:
        chunks = 2 if name == "zb-v" else 1
    verify(name, ranks, micro, chunks)


def test_less_idle_than_1f1b() -> None:
    """ZB-H1 leaves (P-1)(F + I - W); the V-shaped ones no more than that."""
    for ranks, micro in ((2, 8), (4, 16), (4, 32)):
        idle = {n: simulate(r.build(ranks, micro)).bubble for n, r in SCHEDULES.items()}
        assert idle["zb-h1"] < idle["1f1b"]
        assert idle["zb-v"] <= idle["zb-h1"] and idle["dualpipe-v"] <= idle["zb-h1"]
    costs = Costs(forward=2.0, input=3.0, weight=1.5)
    assert simulate(SCHEDULES["zb-h1"].build(4, 16), costs).duration == pytest.approx(16 * 6.5 + 3 * 3.5)


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe-v"])
def test_late_messages_hold_nobody_up(name: str) -> None:
    """Where ranks have other work than to wait, a message that takes a tenth of a computation costs next to nothing."""
    for ranks, micro in ((2, 8), (4, 16)):
        schedule = SCHEDULES[name].build(ranks, micro)
        assert simulate(schedule, Costs(message=0.1)).duration <= 1.015 * simulate(schedule).duration


# --- against torch's own ------------------------------------------------------------------------------------------------


def torch_orders(name: str, ranks: int, micro: int, chunks: int) -> list[list[Action]]:
    from torch.distributed.pipelining import schedules as theirs

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

    def stage(index: int) -> MagicMock:
        made = MagicMock(group_size=ranks, group_rank=0, num_stages=ranks * chunks, stage_index=index)
        made.is_first, made.is_last = index == 0, index == ranks * chunks - 1
        return made

    cls = getattr(theirs, name)
    if chunks == 1:
        order = cls(stage(0), micro, scale_grads=False)._get_pipeline_order()
    else:
        v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        indices = (0, 2 * ranks - 1) if v_shaped else range(0, ranks * chunks, ranks)
        order = cls([stage(i) for i in indices], micro, scale_grads=False).pipeline_order

    def flat(action: object) -> Iterator[Action]:
        if action is None:
            return
        if getattr(action, "sub_actions", None):
            for sub in action.sub_actions:  # type: ignore[attr-defined]
                yield from flat(sub)
            return
        kind = action.computation_type.name  # type: ignore[attr-defined]
        if kind in kinds:  # REDUCE_GRAD is a mark
            yield Action(Kind(kinds[kind]), action.stage_index, action.microbatch_index)  # type: ignore[attr-defined]

    return [[a for entry in order[rank] for a in flat(entry)] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ours", "theirs", "chunks"),
    [("gpipe", "ScheduleGPipe", 1), ("1f1b", "Schedule1F1B", 1), ("interleaved", "ScheduleInterleaved1F1B", 2)],
)
@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8), (4, 4)])
def test_equal_to_torch(ours: str, theirs: str, chunks: int, ranks: int, micro: int) -> None:
    schedule = SCHEDULES[ours].build(ranks, micro, chunks)
    expected = torch_orders(theirs, ranks, micro, chunks)
    if ours == "1f1b":  # torch's listing counts the forwards of its last rank from 1 (it does not run from this listing)
        shift = expected[-1][0].micro
        expected[-1] = [dataclasses.replace(a, micro=a.micro - shift) if a.kind is Kind.FORWARD else a for a in expected[-1]]
    for rank in range(ranks):
        assert list(schedule.compute(rank)) == expected[rank], f"rank {rank}"


@pytest.mark.parametrize(("ours", "theirs"), [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipe-v", "ScheduleDualPipeV")])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 8), (4, 8), (4, 16)])
def test_no_longer_than_torch(ours: str, theirs: str, ranks: int, micro: int) -> None:
    """Other orders than torch's are free to differ; played through with the same costs they take no longer."""
    schedule = SCHEDULES[ours].build(ranks, micro)
    rival = lower(theirs, tuple(map(tuple, torch_orders(theirs, ranks, micro, 2))), schedule.placement, micro)
    check(rival)
    assert simulate(schedule).duration <= simulate(rival).duration


# --- broken ones ----------------------------------------------------------------------------------------------------------


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return dataclasses.replace(schedule, ranks=tuple(tuple(actions) if r == rank else a for r, a in enumerate(schedule.ranks)))


def edit(name: str, rank: int, what: str) -> Schedule:
    schedule = SCHEDULES[name].build(2, 4)
    actions = list(schedule.ranks[rank])
    find = {str(a): i for i, a in enumerate(actions)}
    if what.startswith("drop "):
        del actions[find[what[5:]]]
    elif what.startswith("double "):
        actions.insert(find[what[7:]], actions[find[what[7:]]])
    elif what.startswith("swap "):
        a, b = (find[x] for x in what[5:].split())
        actions[a], actions[b] = actions[b], actions[a]
    return changed(schedule, rank, actions)


@pytest.mark.parametrize(
    ("name", "rank", "what", "reason"),
    [
        ("1f1b", 0, "drop F2@0", "F2@0 is there 0 times instead of 1"),
        ("1f1b", 1, "double B1@1", "B1@1 is there 2 times"),
        ("1f1b", 1, "drop RA1@1", "activation into stage 1, micro-batch 1 is received 0 times"),
        ("1f1b", 1, "drop SG2@1", "gradient for the output of stage 0, micro-batch 2 is sent 0 times"),
        ("1f1b", 0, "swap F0@0 B0@0", "comes before"),
        ("gpipe", 1, "swap RA0@1 F0@1", "F0@1 comes before the receive"),
        ("gpipe", 1, "swap SG0@1 B0@1", "SG0@1 comes before what it sends is computed"),
        ("gpipe", 0, "swap SA0@0 SA1@0", "comes before what it sends"),
        ("gpipe", 1, "swap RA0@1 RA1@1", "comes before the receive"),
        ("zb-h1", 0, "swap I1@0 W1@0", "W1@0 comes before I1@0"),
        ("1f1b", 0, "drop step", "has to end with its only step"),
        ("1f1b", 0, "drop reduce(0)", "reduce(0) has to stand once"),
    ],
)
def test_broken_ones_are_refused_with_the_reason(name: str, rank: int, what: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        check(edit(name, rank, what))


def test_messages_in_another_order_are_refused() -> None:
    schedule = SCHEDULES["gpipe"].build(2, 2)
    actions = [a for a in schedule.ranks[1] if str(a) not in ("RA0@1", "RA1@1")]
    with pytest.raises(ScheduleError, match="rank 0 sends the activation into stage 1, micro-batch 0 where rank 1 receives"):
        check(changed(schedule, 1, [Action(Kind.RECV_ACTIVATION, 1, 1), Action(Kind.RECV_ACTIVATION, 1, 0), *actions]))


def test_a_circle_of_blocking_messages_is_found() -> None:
    """Both ranks send before they receive: fine with asynchronous messages, a standstill with blocking ones."""
    schedule = SCHEDULES["1f1b"].build(2, 2)
    sends = [str(a) for a in schedule.ranks[0]]
    assert sends.index("SA1@0") < sends.index("RG0@0")
    actions = [a for a in schedule.ranks[1] if str(a) != "RA1@1"]
    at = [str(a) for a in actions].index("SG0@1") + 1
    with pytest.raises(ScheduleError, match="stands still with blocking messages: rank 0 at SA1@0, rank 1 at SG0@1"):
        check(changed(schedule, 1, [*actions[:at], Action(Kind.RECV_ACTIVATION, 1, 1), *actions[at:]]))


def test_orders_that_wait_in_a_circle_are_refused() -> None:
    order = ((Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)), (Action(Kind.BACKWARD, 1, 0), Action(Kind.FORWARD, 1, 0)))
    with pytest.raises(ScheduleError, match="stands still.*rank 1 at B0@1 waits for F0@1"):
        lower("circle", order, (0, 1), 1)


# --- users' own, names, drawing ---------------------------------------------------------------------------------------------


@schedule_rule("one by one")
def one_by_one(ranks: int, micro_batches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """A user's own: every micro-batch goes through and back before the next."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return tuple(tuple(Action(k, r, i) for i in range(micro_batches) for k in kinds) for r in range(ranks))


def test_a_users_own_schedule_is_one_function() -> None:
    assert find_rule(one_by_one) is one_by_one
    assert find_rule(f"{__name__}:one_by_one") is one_by_one
    checked = check(one_by_one.build(3, 4))
    assert checked.peak_live == (1, 1, 1)
    assert simulate(checked.schedule).bubble == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["1f1", "no.such.module:x", f"{__name__}:legal", "x", legal, None])
def test_names_that_are_none(name: Any) -> None:
    with pytest.raises(ScheduleError, match="did you mean `1f1b`|No module|schedule_rule|'x' is not known"):
        find_rule(name)


def _each(*kinds: Kind) -> Any:
    """A user's function: every rank does these for one micro-batch after the other."""
    return lambda ranks, micro, chunks: [[Action(k, r, i) for i in range(micro) for k in kinds] for r in range(ranks)]


@pytest.mark.parametrize(
    ("orders", "reason"),
    [
        (lambda *numbers: None, "is NoneType; it must be one list of actions for each rank"),
        (lambda *numbers: one_by_one.orders(*numbers)[1:], "has lists for 1 ranks, not 2"),
        (lambda *numbers: one_by_one.orders(*numbers)[::-1], "rank 0 has F0@1, but stage 1 is not on it"),
        (lambda ranks, micro, chunks: one_by_one.orders(ranks, micro + 1, 1), "rank 0 has F3@0, but there are micro-batches 0 to 2"),
        (lambda ranks, micro, chunks: one_by_one.orders(ranks, micro - 1, 1), "F2@0 is there 0 times"),
        (lambda ranks, micro, chunks: [[("F", r, 0)] for r in range(ranks)], "rank 0: .* is no computation"),
        (_each(Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.BACKWARD), "SA0@0 is no computation; sends, receives and marks are added"),
        (_each(Kind.FORWARD, Kind.WEIGHT, Kind.INPUT), "rank 1 at W0@1 waits for I0@1"),
        (_each(Kind.FORWARD, Kind.INPUT), "W0@0 is there 0 times"),
        (_each(Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT), "W0@0 is there 2 times"),
    ],
)
def test_a_wrong_one_of_a_user_is_refused_with_the_reason(orders: Any, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        check(schedule_rule("wrong")(orders).build(2, 3))


@pytest.mark.parametrize("placement", [lambda r, c: (0,) * r, lambda r, c: (), lambda r, c: (0, 5)])
def test_a_rank_without_a_stage_is_refused(placement: Any) -> None:
    with pytest.raises(ScheduleError, match="places its stages on ranks .*; each of 0 to 1 must have one"):
        schedule_rule("nowhere", placement)(one_by_one.orders).build(2, 3)


@pytest.mark.parametrize("numbers", [(0, 4), (2.0, 4), (2, 0), (2, 4, 0), (2, 4, 2)])
def test_numbers_that_no_schedule_has(numbers: Any) -> None:
    with pytest.raises(ScheduleError, match="it is a whole number, at least 1|has 1 stage"):
        SCHEDULES["1f1b"].build(*numbers)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
def test_backward_in_one_part(name: str) -> None:
    """For stages that compute their activations again: complete, and no rank holds more."""
    parts = check(SCHEDULES[name].build(4, 8))
    whole = check(whole_backward(parts.schedule))
    kinds = {a.kind for rank in range(4) for a in whole.schedule.compute(rank)}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}
    assert all(w <= p for w, p in zip(whole.peak_live, parts.peak_live, strict=True))


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_forward_only(placement: tuple[int, ...]) -> None:
    checked = check(forward_schedule(placement, 5))
    assert not checked.schedule.trains and set(checked.peak_live) == {1}


def test_the_command_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert main(["schedule", "--name", "1f1b", "--stages", "4", "--micro-batches", "8", "--output", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "idle 27.27%" in out and "by rank: 4, 3, 2, 1" in out and out.count("rank ") >= 4
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 4 * 16 and max(e["ts"] + e["dur"] for e in events) == 33 * 1000
    assert main(["schedule", "--name", "dualpipe-v", "--micro-batches", "2"]) == 2
    assert "at least 8" in capsys.readouterr().err
    for output in (tmp_path / "none" / "trace.json", tmp_path / "none" / "picture.png", tmp_path / "picture.txt", tmp_path):
        assert main(["schedule", "--output", str(output)]) == 2
        assert str(output) in capsys.readouterr().err
    for wrong in (["--width", "0"], ["--forward", "-1"], ["--message", "nan"], ["--weight", "long"], ["--unknown", "1"]):
        assert main(["schedule", *wrong]) == 2
        told = capsys.readouterr().err
        assert " ".join(wrong) in told or f"argument {wrong[0]}: {wrong[1]!r} is no" in told, told
        assert "zerorun schedule --help" in told


def test_the_command_finds_a_schedule_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the console script, whose own folder is not that of the user."""
    (tmp_path / "beside.py").write_text("from tests.pipeline.test_schedules import one_by_one\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    assert main(["schedule", "--name", "beside:one_by_one", "--stages", "2"]) == 0


def test_text_shows_every_action() -> None:
    timeline = simulate(SCHEDULES["zb-h1"].build(2, 3))
    text = as_text(timeline)
    for rank, line in enumerate(text.splitlines()):
        for action in timeline.schedule.compute(rank):
            assert str(action).partition("@")[0] in line
    assert len(as_trace([("a", timeline), ("b", timeline)])["traceEvents"]) == 2 * (3 + 18)
