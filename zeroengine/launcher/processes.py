"""Finding and ending every process of a job, whatever its parent is by now. Linux: reads /proc.

A process belongs to a job if its environment carries the job's mark, or if it lies in the session of one of the job's
ranks (each rank leads a session of its own). Grandchildren such as data-loader workers are found either way.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

MARK = "ZERORUN_JOB"


def _session(pid: str) -> int | None:
    """The session of a process; None for one that is gone or a zombie, which has ended already."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()  # the name in parentheses may hold anything
    except OSError:
        return None
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[3])


def _carries(pid: str, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def members(job: str, sessions: Collection[int]) -> list[int]:
    """Process ids of the job that are alive, without this process."""
    mark, own, found = f"{MARK}={job}".encode(), os.getpid(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own:
            continue
        session = _session(name)
        if session is not None and (session in sessions or _carries(name, mark)):
            found.append(int(name))
    return found


def send(pids: Collection[int], number: signal.Signals) -> None:
    """Sends a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


class Ending:
    """The end of a job's processes, a step at a time: SIGTERM, up to `grace` seconds of patience, SIGKILL until nothing is
    left (5 s at most: a process may hang in the kernel, where no signal reaches it)."""

    def __init__(self, job: str, sessions: Collection[int], grace: float) -> None:
        self._job, self._sessions = job, sessions
        self._patience = time.monotonic() + grace
        self._limit = self._patience + 5
        self._asked = grace <= 0

    def hasten(self) -> None:
        """No more patience."""
        self._patience, self._asked = time.monotonic(), True

    def step(self) -> bool:
        """True when nothing is left, or nothing more can be done."""
        found = members(self._job, self._sessions)
        if not found or time.monotonic() >= self._limit:
            return True
        if time.monotonic() >= self._patience:
            send(found, signal.SIGKILL)
        elif not self._asked:
            send(found, signal.SIGTERM)
            self._asked = True
        return False


def end_all(job: str, sessions: Collection[int], grace: float) -> None:
    """Ends all processes of a job, and returns when none is left."""
    ending = Ending(job, sessions, grace)
    while not ending.step():
        time.sleep(0.02)


def kill_sessions(sessions: Collection[int]) -> None:
    """SIGKILL to every process in these sessions."""
    found = [int(name) for name in os.listdir("/proc") if name.isdigit() and _session(name) in sessions]
    send([pid for pid in found if pid != os.getpid()], signal.SIGKILL)
