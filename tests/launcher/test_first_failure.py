"""Which rank is shown as the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.jobs import Launches, wait_until
from zeroengine.launcher.failures import Attempt, ErrorRecord, RankEnd, aftermath, first_failure, report
from zeroengine.launcher.watch import RankWatch

pytestmark = pytest.mark.timeout(120)


def error(time: float, peer: bool = False, title: str = "ValueError: x") -> ErrorRecord:
    return ErrorRecord("exception", title, 1, f"Traceback\n{title}", peer, time)


def test_the_clock_decides_and_not_the_index() -> None:
    ends = [RankEnd(0, 10, 1, 5.0, error(4.0)), RankEnd(1, 11, 1, 6.0, error(3.5)), RankEnd(2, 12, 0, 1.0)]
    assert first_failure(ends) is ends[1]


def test_the_time_of_the_error_counts_and_not_that_of_the_end() -> None:
    ends = [RankEnd(0, 10, 7, 5.0), RankEnd(1, 11, 1, 9.0, error(4.0))]
    assert first_failure(ends) is ends[1]


def test_a_rank_that_blames_a_peer_is_the_cause_only_where_no_other_is() -> None:
    ends = [RankEnd(0, 10, 1, 2.0, error(1.0, peer=True)), RankEnd(1, 11, -signal.SIGKILL, 3.0)]
    assert first_failure(ends) is ends[1]
    assert first_failure(ends[:1]) is ends[0]


def test_ranks_that_were_stopped_are_no_cause() -> None:
    stopped = RankEnd(0, 10, -signal.SIGTERM, 1.0, stopped=True)
    assert first_failure([stopped, RankEnd(1, 11, 0, 2.0)]) is None


def test_report_and_aftermath() -> None:
    first = RankEnd(3, 13, -signal.SIGKILL, 1.0, host="node7")
    assert report(first).startswith("rank 3 failed first (host node7, pid 13, killed by SIGKILL). ")
    others = [
        first,
        RankEnd(0, 10, 1, 2.0, error(2.0, title="RankError: rank 3 died")),
        RankEnd(1, 11, -15, stopped=True),
    ]
    assert aftermath(first, others) == "rank 0 failed after it: RankError: rank 3 died\nended rank 1"
    assert first.exit_code == 137


# Rank 0 notices at once that its peer is gone and blames it, as the engine does; its index is lower.
BLAMED = """
    import os, pathlib, signal, sys, time
    folder, rank = pathlib.Path(os.environ["FOLDER"]), os.environ["RANK"]
    def cause():
        {cause}
    if rank == "1":
        while not (folder / "ready").exists():
            time.sleep(0.01)
        (folder / "gone").touch()
        cause()
    (folder / "ready").touch()
    while not (folder / "gone").exists():
        time.sleep(0.001)
    {consequence}
"""


BLAME = "from zeroengine.errors import DivergenceError; raise DivergenceError('rank 1 called another')"
CLOSED = "raise RuntimeError('[gloo] Connection closed by peer [127.0.0.1]:4711')"


@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        ("time.sleep(0.3); raise KeyError('cause')", BLAME),
        ("time.sleep(0.3); os._exit(9)", BLAME),
        ("time.sleep(0.3); raise KeyError('cause')", CLOSED),
    ],
)
def test_a_consequence_that_comes_earlier_is_not_shown_as_the_cause(launches: Launches, cause: str, consequence: str) -> None:
    job = launches.run("--nproc", "2", launches.script(BLAMED.format(cause=cause, consequence=consequence)))
    assert "rank 1 failed first" in job.err
    assert job.process.returncode == (9 if "_exit" in cause else 1)
    assert "rank 0 failed after it: " in job.err
    assert job.err.count("Traceback") == (0 if "_exit" in cause else 1)


def test_the_earlier_of_two_failures_is_the_cause(launches: Launches) -> None:
    consequence = "time.sleep(0.05); raise ValueError('later')"
    job = launches.run("--nproc", "2", launches.script(BLAMED.format(cause="sys.exit(4)", consequence=consequence)))
    assert job.process.returncode == 4
    assert "rank 1 failed first" in job.err
    assert "rank 0 failed after it: ValueError: later" in job.err or "ended rank 0" in job.err


def test_the_traceback_is_shown_once_and_without_the_launchers_frames(launches: Launches) -> None:
    job = launches.run("--nproc", "2", launches.script("def f():\n    raise ValueError('boom')\nf()\n"))
    assert job.err.count("Traceback (most recent call last)") == 1 and job.err.count("in f\n") == 1
    assert "bootstrap.py" not in job.err and "torch" not in job.err and "Elastic" not in job.err
    assert "failed after it: ValueError: boom" in job.err or "ended rank" in job.err  # the other, told to end by then


def test_a_hook_of_the_programs_own_is_called(launches: Launches) -> None:
    script = "import sys\nsys.excepthook = lambda kind, error, trace: print('hooked', kind.__name__)\nraise ValueError('x')"
    job = launches.run("--nproc", "1", launches.script(script))
    assert job.out == "hooked ValueError\n"


def test_a_script_that_does_not_compile(launches: Launches) -> None:
    job = launches.run("--nproc", "1", launches.script("x = (\n"))
    assert job.process.returncode == 1
    assert "SyntaxError" in job.err and str(Path(launches.folder, "job.py")) in job.err


def test_a_rank_stopped_before_the_cause_was_noticed_is_no_cause(tmp_path: Path) -> None:
    """torch may collect the dead rank and stop the other before the thread that waits for the first has its turn."""
    os.mkfifo(tmp_path / "events")
    events: list[dict[str, Any]] = []
    RankWatch(str(tmp_path), "job", 60.0, events.append)
    dead = subprocess.Popen(["sh", "-c", "kill -9 $$"])
    dead.wait()  # collected: nobody can wait for it any more
    told = subprocess.Popen(["sleep", "600"])
    with open(tmp_path / "events", "w") as pipe:
        for rank, pid in ((1, dead.pid), (0, told.pid)):
            pipe.write(json.dumps({"event": "start", "attempt": 0, "rank": rank, "pid": pid}) + "\n")
    assert wait_until(lambda: len(events) == 3 and any(e["event"] == "collected" for e in events), 10)
    told.terminate()
    assert wait_until(lambda: any(e["event"] == "exit" for e in events), 10)
    told.wait()
    attempt = Attempt(0)
    for event in events:
        attempt.take(event)
    attempt.fill_in([{"rank": 0, "pid": told.pid, "status": -15}, {"rank": 1, "pid": dead.pid, "status": -9}], "", time.monotonic(), False)
    first = attempt.first
    assert first is not None and first.rank == 1 and first.exit_code == 137
    assert first.time < next(e["time"] for e in events if e["event"] == "exit")


@pytest.mark.parametrize("statuses", list(permutations((-15, -9, -15))))
def test_the_cause_is_found_where_torch_collected_all_ranks_first(statuses: tuple[int, ...]) -> None:
    """Nothing was seen but starts; the one that torch did not end itself is the cause, on whatever rank."""
    attempt = Attempt(0)
    for rank in range(3):
        attempt.take({"event": "start", "rank": rank, "pid": 100 + rank})
    attempt.fill_in([{"rank": r, "pid": 100 + r, "status": s} for r, s in enumerate(statuses)], "host", 1.0, False)
    assert attempt.first is not None and attempt.first.status == -9
    assert [end.rank for end in attempt.ends.values() if not end.stopped] == [attempt.first.rank]


def test_ranks_that_were_told_to_end_are_no_cause() -> None:
    attempt = Attempt(0)
    attempt.fill_in([{"rank": 0, "pid": 100, "status": -9}], "host", 1.0, True)
    assert attempt.first is None
