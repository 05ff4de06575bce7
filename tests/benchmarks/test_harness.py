from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks.errors import Unavailable, WorkerFailed
from benchmarks.harness import WorkerGroup, number, paired_ratio, quartiles, rotated, table


def _group(job: str, world: int = 2) -> WorkerGroup:
    name = f"tests.benchmarks.jobs:{job}"
    return WorkerGroup(job, name, {"value": 10}, python=sys.executable, world=world, threads=1, timeout=60.0)


def test_group_answers_in_rank_order_and_keeps_state_between_turns() -> None:
    with _group("Echo", world=3) as group:
        group.ask({"add": 1})
        answers = group.ask({"add": 2})
    assert answers == [{"value": 13, "rank": r, "world": 3} for r in range(3)]


def test_processes_are_gone_when_the_group_is_left() -> None:
    with _group("Echo") as group:
        pids = [facts["pid"] for facts in group.facts]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_job_that_raises_is_reported_with_its_rank_and_traceback() -> None:
    with _group("Bad") as group, pytest.raises(WorkerFailed, match=r"(?s)Bad: rank 1 raised.*subject and remedy"):
        group.ask({"add": 1, "how": "raise", "rank": 1})


def test_process_that_dies_is_reported_with_exit_code_and_log() -> None:
    with _group("Bad") as group, pytest.raises(WorkerFailed, match=r"(?s)rank 0 ended \(exit code 7\).*last words"):
        group.ask({"add": 1, "how": "exit"})


def test_process_that_hangs_is_reported_in_time_and_killed() -> None:
    begin = time.monotonic()
    with _group("Bad") as group:
        pids = [facts["pid"] for facts in group.facts]
        group.timeout = 1.0
        with pytest.raises(WorkerFailed, match=r"no answer within 1 s from ranks \[1\]"):
            group.ask({"add": 1, "how": "hang", "rank": 1})
    assert time.monotonic() - begin < 45
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_is_not_installed_is_told_apart_from_failure() -> None:
    with pytest.raises(Unavailable, match="not installed here"):
        _group("Missing", world=1)


def test_ratio_is_taken_round_by_round() -> None:
    # the machine was ten times slower in the second round: the ratio does not notice, that of the medians would
    assert paired_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0])["median"] == 2.0
    with pytest.raises(ValueError, match="paired"):
        paired_ratio([1.0], [1.0, 2.0])


def test_quartiles() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert quartiles([3.0]) == (3.0, 3.0)


def test_every_item_starts_a_round_once() -> None:
    orders = [rotated(["a", "b", "c"], turn) for turn in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert rotated([], 5) == []


def test_table_is_aligned() -> None:
    text = table(["name", "value"], [["a", number(1.25, ".1f")], ["longer", number(None, ".1f")]])
    assert text.splitlines() == ["name    value", "-------------", "a         1.2", "longer      -"]
