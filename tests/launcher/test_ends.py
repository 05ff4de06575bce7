"""However a job ends, all of it ends in time, the first failure is what is shown, and its exit code is kept."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.launcher.jobs import Job, Launches, wait_until

pytestmark = pytest.mark.timeout(120)

# Each rank has two children, one of them in a session of its own, as the worst of data-loader workers would be. When
# all are there, rank 1 does `then`; rank 0 waits.
WITH_GRANDCHILD = """
    import os, pathlib, signal, subprocess, sys, time
    rank = int(os.environ["RANK"])
    folder = pathlib.Path(os.environ["FOLDER"])
    for own_session in (False, True):
        made = str(folder / f"grandchild-{{rank}}-{{own_session}}")
        subprocess.Popen(["sh", "-c", f"touch '{{made}}'; exec sleep 600"], start_new_session=own_session)
    {before}
    names = [f"grandchild-{{r}}-{{s}}" for r in (0, 1) for s in (False, True)]
    while not all((folder / n).exists() for n in names):
        time.sleep(0.02)
    (folder / f"ready-{{rank}}").touch()
    while not (folder / "ready-0").exists():
        time.sleep(0.02)
    if rank == 1:
        {then}
    time.sleep(600)
"""
IGNORE_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"


def with_grandchild(launches: Launches, then: str = "pass", before: str = "pass") -> str:
    return launches.script(WITH_GRANDCHILD.format(then=then, before=before))


@pytest.mark.parametrize(
    ("then", "code", "shown"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("os._exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_fails_ends_the_job(launches: Launches, then: str, code: int, shown: str) -> None:
    job = launches.start("--nproc", "2", with_grandchild(launches, then))
    launches.wait_for("ready-1")
    assert job.finish(10) == code
    assert "rank 1 failed first" in job.err and shown in job.err
    assert not job.alive()


def test_ranks_that_ignore_sigterm_are_killed(launches: Launches) -> None:
    script = with_grandchild(launches, "raise ValueError('boom')", before=IGNORE_SIGTERM)
    job = launches.start("--nproc", "2", "--grace", "2", script)
    launches.wait_for("ready-1")
    assert job.finish(10) == 1
    assert not job.alive()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_raises_and_then_hangs_ends_the_job(launches: Launches, restarts: int) -> None:
    """A thread that is not a daemon keeps the interpreter alive after the exception."""
    then = "import threading; threading.Thread(target=time.sleep, args=(600,)).start(); raise ValueError('boom')"
    script = with_grandchild(launches, then)
    job = launches.start("--nproc", "2", "--grace", "2", "--max-restarts", str(restarts), script)
    launches.wait_for("ready-1")
    assert job.finish(10 * (1 + restarts)) == 1
    assert job.err.count("ValueError: boom") == 1 + restarts and "rank 1 failed first" in job.err
    assert not job.alive()


@pytest.mark.parametrize(("number", "ignored"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, False)])
def test_a_signal_to_the_launcher_ends_the_job(launches: Launches, number: signal.Signals, ignored: bool) -> None:
    script = with_grandchild(launches, before=IGNORE_SIGTERM if ignored else "pass")
    job = launches.start("--nproc", "2", "--grace", "2", script)
    launches.wait_for("ready-0", "ready-1")
    job.process.send_signal(number)
    assert job.finish(10) == 128 + number
    assert number.name in job.err and "Traceback" not in job.err
    assert not job.alive()


@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_a_signal_twice_in_a_row(launches: Launches, pause: float) -> None:
    """At once it is one; later the second one kills those that ignore the first, whatever the grace period."""
    script = with_grandchild(launches, before=IGNORE_SIGTERM if pause else "pass")
    job = launches.start("--nproc", "2", "--grace", "60" if pause else "5", script)
    launches.wait_for("ready-0", "ready-1")
    job.process.send_signal(signal.SIGINT)
    time.sleep(pause)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(10) == 130
    assert "Traceback" not in job.err
    assert not job.alive()


def test_a_signal_before_the_ranks_start(launches: Launches) -> None:
    job = launches.start("--nproc", "2", launches.script("import time; time.sleep(600)"))
    assert wait_until(lambda: len(job.alive()) >= 2, 10)  # the agent is there, and imports torch
    job.process.send_signal(signal.SIGINT)
    assert job.finish(10) == 130
    assert "Traceback" not in job.err
    assert not job.alive()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_killed_launcher_leaves_no_process(launches: Launches, ignored: bool) -> None:
    script = with_grandchild(launches, before=IGNORE_SIGTERM if ignored else "pass")
    job = launches.start("--nproc", "2", "--grace", "2", script)
    launches.wait_for("ready-0", "ready-1")
    job.process.kill()
    assert not job.wait_gone(10)


def agent_of(job: Job) -> int:
    (agent,) = psutil.Process(node_of(job)).children()
    return int(agent.pid)


def node_of(job: Job) -> int:
    (node,) = psutil.Process(job.process.pid).children()
    return int(node.pid)


def test_launcher_node_and_agent_killed_together_leave_no_rank(launches: Launches) -> None:
    """The kernel ends the ranks: nobody else is left who could, but for the node between the two, which is stopped."""
    script = """
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(os.environ["FOLDER"], "ready-" + os.environ["RANK"]).touch()
        time.sleep(600)
    """
    job = launches.start("--nproc", "2", launches.script(script))
    launches.wait_for("ready-0", "ready-1")
    node, agent = node_of(job), agent_of(job)
    for pid in (node, agent):
        os.kill(pid, signal.SIGSTOP)
    job.process.kill()
    for pid in (node, agent):
        os.kill(pid, signal.SIGKILL)
    assert not job.wait_gone(10)


def test_a_killed_agent_leaves_no_process(launches: Launches) -> None:
    job = launches.start("--nproc", "2", with_grandchild(launches))
    launches.wait_for("ready-0", "ready-1")
    os.kill(agent_of(job), signal.SIGKILL)
    assert job.finish(10) == 137
    assert "the agent" in job.err and "SIGKILL" in job.err
    assert not job.alive()


def test_a_killed_node_leaves_no_process(launches: Launches) -> None:
    job = launches.start("--nproc", "2", with_grandchild(launches))
    launches.wait_for("ready-0", "ready-1")
    os.kill(node_of(job), signal.SIGKILL)
    assert job.finish(10) == 1
    assert "is lost: its node ended" in job.err
    assert not job.alive()


def test_grandchildren_end_with_a_job_that_succeeds(launches: Launches) -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    job = launches.run("--nproc", "1", launches.script(script))
    assert job.process.returncode == 0
    assert not job.alive()


def test_a_signal_lets_ranks_save_and_shows_what_they_could_not(launches: Launches) -> None:
    script = """
        import os, pathlib, signal, sys, time
        folder, rank = pathlib.Path(os.environ["FOLDER"]), os.environ["RANK"]
        def save(number, frame):
            (folder / f"saved-{rank}").touch()
            if rank == "1":
                raise OSError("disk full")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        (folder / f"ready-{rank}").touch()
        time.sleep(600)
    """
    job = launches.start("--nproc", "2", launches.script(script))
    launches.wait_for("ready-0", "ready-1")
    job.process.terminate()
    assert job.finish(10) == 143
    launches.wait_for("saved-0", "saved-1", bound=0)
    assert "rank 1 failed while SIGTERM ended the job" in job.err and job.err.count("OSError: disk full") == 1


def test_restarts(launches: Launches) -> None:
    script = """
        import os, sys, time
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        print("attempt", attempt)
        if attempt == "0" and rank == "1":
            raise ValueError("boom")
        time.sleep(600 if attempt == "0" else 0)
        sys.exit(5 if os.environ.get("AGAIN") else 0)
    """
    job = launches.run("--nproc", "2", "--max-restarts", "1", launches.script(script))
    assert job.process.returncode == 0
    assert job.err.count("ValueError: boom") == 1 and "restarting all ranks (1 of 1 restarts)" in job.err
    assert "[rank1] attempt 1" in job.out
    job = launches.run("--nproc", "2", "--max-restarts", "1", launches.script(script), env={"AGAIN": "1"})
    assert job.process.returncode == 5
    assert job.err.count("failed first") == 2
    assert not job.alive()
