"""Who is to blame, from heartbeats: pure, no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroengine.comm.diagnosis import Diagnosis, Verdict
from zeroengine.comm.status import PeerView, Status, Wait, Worker, pack_ranks, unpack_ranks

BASE = Status(beat=5, pid=1, host="node7", machine="elsewhere", started="1", issued={"params": 3}, line="train.py:1 (f)")


def wait(lane: str, index: int, ranks: list[int]) -> Wait:
    return Wait(lane, index, f"all_gather 'x' ({lane}, operation {index})", ranks)


def judge(
    statuses: dict[int, Status | None], silent: dict[int, float] | None = None, issued: int = 4, own: Status | None = None
) -> Verdict:
    """Rank 0 waits for operation 3 of `params` of all."""
    ranks = [0, *statuses]
    views = {r: PeerView(r, s, (silent or {}).get(r, 0.0)) for r, s in statuses.items()}
    mine = replace(BASE, issued={"params": issued, "control": 0})
    return Diagnosis(0, wait("params", 3, ranks), own or mine, views.__getitem__, "here", 5.0).verdict()


def test_busy_in_user_code_is_slow() -> None:
    verdict = judge({1: BASE})
    assert verdict.cause == "slow" and verdict.ranks == (1,) and "train.py:1" in verdict.text


def test_all_take_part() -> None:
    assert judge({1: replace(BASE, issued={"params": 4})}).cause == "progress"


@pytest.mark.parametrize(
    ("status", "silent", "says"),
    [
        (replace(BASE, state="failed", error="KeyError: 'x'"), 0.0, "failed: KeyError"),
        (replace(BASE, state="exited"), 0.0, "has exited"),
        (BASE, 6.0, "silent since 6 s"),
        (None, 6.0, "rank 1 is silent"),
        (replace(BASE, poisoned={"params": "broken pipe"}), 0.0, "left 'params' after an error: broken pipe"),
    ],
)
def test_dead(status: Status | None, silent: float, says: str) -> None:
    verdict = judge({1: status}, {1: silent})
    assert verdict.cause == "dead" and verdict.ranks == (1,) and says in verdict.text


def test_the_first_cause_is_named_and_not_those_who_report_it() -> None:
    report = replace(BASE, state="failed", error="RankError: rank 2 ...", secondary=True)
    assert judge({1: report, 2: replace(BASE, state="failed", error="OOM")}).ranks == (2,)
    assert judge({1: report, 2: BASE}).ranks == (1,)


def test_circle() -> None:
    other = replace(BASE, waits=[wait("control", 0, [0, 1])])
    verdict = judge({1: other})
    assert verdict.cause == "divergence" and verdict.ranks == (1,)
    assert not verdict.confirms(None)
    assert not verdict.confirms(verdict), "the same heartbeat is no confirmation"
    later = judge({1: replace(other, beat=6)})
    assert later.confirms(verdict)
    assert not judge({1: replace(other, beat=7, waits=[wait("control", 1, [0, 1])])}).confirms(verdict)


def test_longer_circle_names_everyone_on_it() -> None:
    b = replace(BASE, issued={"params": 3, "ab": 1}, waits=[wait("ab", 0, [1, 2])])
    c = replace(BASE, issued={"params": 3}, waits=[wait("control", 0, [0, 2])])
    verdict = judge({1: b, 2: replace(c, issued={"params": 4})})
    assert verdict.cause == "divergence" and verdict.ranks == (1, 2)


def test_chain_that_ends_in_user_code_is_slow() -> None:
    b = replace(BASE, issued={"params": 3, "ab": 1}, waits=[wait("ab", 0, [1, 2])])
    verdict = judge({1: b, 2: replace(BASE, issued={"params": 4})})
    assert verdict.cause == "slow" and verdict.ranks == (2,)


def threads(status: Status, **lanes: list[str]) -> Status:
    """With threads beside the main one, by name, and the streams on which they issue."""
    idents = {"a": 1, "b": 2}
    workers = [Worker(idents[name], f"{name}.py:1 (f)", keys) for name, keys in lanes.items()]
    return replace(status, workers=workers, issued={**status.issued, **{key: 3 for keys in lanes.values() for key in keys}})


def test_only_the_thread_that_issues_on_a_stream_holds_it_up() -> None:
    """Rank 0 waits on `params` in its main thread, rank 1 on `other` in a thread a; each has another thread that is late."""
    late = threads(replace(BASE, waits=[replace(wait("other", 3, [0, 1]), thread=1)]), a=["other"])
    mine = threads(replace(BASE, issued={"params": 4}), a=["other"])
    verdict = judge({1: late}, own=mine)
    assert verdict.cause == "slow" and verdict.ranks == (1,) and "is in user code at train.py:1" in verdict.text
    both = replace(late, waits=[wait("other", 3, [0, 1])], workers=[], issued={"params": 3, "other": 3})
    verdict = judge({1: both}, own=mine)
    assert verdict.cause == "slow" and verdict.ranks == (0,) and "a.py:1" in verdict.text, "our thread a is late, not this one"
    assert judge({1: both}, own=replace(BASE, issued={"params": 4, "other": 3})).cause == "divergence"


def test_a_circle_through_another_thread_of_ours_is_theirs() -> None:
    theirs = threads(replace(BASE, issued={"params": 3}, waits=[wait("other", 3, [0, 1])]), b=["third"])
    mine = threads(replace(BASE, issued={"params": 4}, waits=[replace(wait("third", 2, [0, 1]), thread=1)]), a=["other", "third"])
    verdict = judge({1: theirs}, own=mine)
    assert verdict.cause == "progress", "their thread b has issued what our thread a waits for"
    mine = replace(mine, waits=[replace(wait("third", 3, [0, 1]), thread=1)], issued={**mine.issued, "third": 4})
    verdict = judge({1: theirs}, own=mine)
    assert verdict.cause == "slow" and verdict.ranks == (1,) and "b.py:1" in verdict.text


def test_a_stream_that_a_rank_has_yet_to_make_is_of_the_thread_that_has_made_all_others() -> None:
    waits = [replace(wait("control", 0, [0, 1]), thread=1)]
    alone = replace(BASE, issued={"start": 3}, waits=waits, workers=[Worker(1, "a.py:1 (f)", ["start"])])
    assert judge({1: alone}).cause == "divergence"
    assert judge({1: replace(alone, issued={"start": 3, "of main": 0})}).cause == "slow"


def test_call_of_torch() -> None:
    assert judge({1: replace(BASE, call="barrier")}).cause == "slow", "in a group that is not known"
    without_us = replace(BASE, call="barrier", call_ranks=[1, 2])
    assert judge({1: without_us, 2: replace(BASE, issued={"params": 4})}).cause == "slow"
    with_us = replace(BASE, call="all_reduce", call_ranks=[0, 1])
    verdict = judge({1: with_us})
    assert verdict.cause == "divergence" and "torch.distributed.all_reduce" in verdict.text


def test_status_survives_the_wire() -> None:
    status = replace(BASE, waits=[wait("params", 3, list(range(0, 4096, 4)))], call="send", call_ranks=[1, 5])
    status = replace(status, workers=[Worker(7, "x.py:1 (f)", ["params"])])
    assert Status.unpack(status.pack()) == status
    assert len(status.pack()) < 800
    for ranks in ([3], [0, 1], [5, 3, 1, -1], [0, 1, 2, 4], list(range(7)), []):
        assert unpack_ranks(pack_ranks(ranks)) == ranks
