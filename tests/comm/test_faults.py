"""Ranks that fail or part ways: every other rank ends within 10 seconds, and its message names the culprit."""

from __future__ import annotations

import re

import pytest

from tests.comm.processes import Ended, run_processes

LIMIT = 10.0


def check(ended: list[Ended], rank: int, error: str, *words: str) -> None:
    """Rank `rank` ended by itself, in time, with `error` and a message that holds `words`."""
    mine = ended[rank]
    assert mine.code == 1, f"rank {rank} ended with {mine.code}\n{mine.output}"
    assert mine.seconds < LIMIT, f"rank {rank} took {mine.seconds:.1f} s\n{mine.output}"
    last = mine.output[mine.output.rfind(f"{error}: ") :]
    assert f"{error}: " in mine.output, mine.output
    for word in words:
        assert re.search(word, last), f"{word!r} is not in\n{last}"


@pytest.mark.parametrize(
    ("how", "victim", "says"),
    [
        ("raise", 1, "failed: ValueError: the tokenizer met a lone surrogate"),
        ("raise", 0, "failed: ValueError: the tokenizer met a lone surrogate"),
        ("sys_exit", 1, "has exited"),
        ("return", 0, "has exited"),
        ("os_exit", 0, "is gone"),
        ("kill", 1, "is gone"),
        ("kill", 0, "is gone"),
        ("stop", 1, "is stopped"),
        ("stop", 0, "is stopped"),
    ],
)
def test_a_rank_ends(how: str, victim: int, says: str) -> None:
    world = 3 if how in ("kill", "stop") else 2
    fresh = how in ("raise", "sys_exit", "return")  # the victim's interpreter is taken down
    ended = run_processes("end", world, victim, how, 10, victims=(victim,) if how == "stop" else (), fresh=fresh)
    for rank in set(range(world)) - {victim}:
        check(
            ended,
            rank,
            "RankError",
            rf"rank {rank} waits for all_gather 'layers\.7\.weight'",
            rf"rank {victim}\b.*{says}",
        )


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_ends_over_gloo(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZE_COMM", "gloo")
    test_a_rank_ends(how, 1, {"kill": "is gone", "stop": "is stopped"}[how])


def test_a_rank_sits_in_a_barrier_of_torch() -> None:
    ended = run_processes("barrier", 2, 1, 10)
    for rank in (0,):
        check(ended, rank, "DivergenceError", "all_gather 'layers.7.weight'", r"rank 1\b.*torch\.distributed\.barrier")
    assert ended[1].code == 1 and ended[1].seconds < LIMIT  # by torch's own error: its peers are gone


def test_a_rank_waits_on_another_communicator() -> None:
    ended = run_processes("other_stream", 2, 1, 10)
    check(ended, 0, "DivergenceError", "all_gather 'layers.7.weight'.*rank 1.*exchange 'clip norm'.*control")
    check(ended, 1, "DivergenceError", "exchange 'clip norm'.*rank 0.*all_gather 'layers.7.weight'.*params")


def test_operations_differ() -> None:
    ended = run_processes("differs", 3, 1, 10)
    usual, odd = "all_gather 'layers.7.weight', 24 x float32", "all_gather 'layers.8.weight', 24 x float32"
    for rank in range(3):
        check(
            ended,
            rank,
            "DivergenceError",
            f"ranks 0, 2: operation 3: {usual}",
            f"rank 1: operation 3: {odd}",
            "'params'",
        )


def test_a_communicator_that_one_rank_never_makes() -> None:
    ended = run_processes("absent", 2, 1, 6)
    check(ended, 0, "DivergenceError", "new_group 'late'.*rank 1.*barrier 'alone'")
    check(ended, 1, "DivergenceError", "barrier 'alone'.*rank 0.*new_group 'late'")


def test_a_slow_rank_is_no_error() -> None:
    ended = run_processes("slow", 3, 1, 3, 2)
    for rank, mine in enumerate(ended):
        assert mine.code == 0 and "FINE" in mine.output, f"rank {rank}\n{mine.output}"
    assert re.search(r"WARNING.*'layers\.7\.weight'.*rank 1 .*user code at comm/faults\.py:\d+ \(slow\)", ended[0].output)


def test_a_rank_that_stays_in_user_code_is_lost_in_the_end() -> None:
    ended = run_processes("stalled", 2, 1, 2, victims=(1,))
    check(ended, 0, "RankError", "did not end within 4 s.*rank 1 .*user code at comm/faults.py")


def test_exit_code_is_kept_when_the_error_is_caught() -> None:
    ended = run_processes("caught", 2, 1, 4, victims=(1,), fresh=True)
    for rank in (0,):
        assert ended[rank].code == 7 and ended[rank].seconds < LIMIT, ended[rank].output
        assert ended[rank].output.count("CAUGHT RankError") == 4
