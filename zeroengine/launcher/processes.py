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


def members(job: str, sessions: Collection[int], keep: Collection[int] = ()) -> list[int]:
    """Process ids of the job that are alive, without this process and those of `keep`."""
    mark, own, found = f"{MARK}={job}".encode(), os.getpid(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own or int(name) in keep:
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


def end_all(job: str, sessions: Collection[int], grace: float, keep: Collection[int] = ()) -> int:
    """SIGTERM, up to `grace` seconds of patience, SIGKILL until nothing is left (5 s at most: a process may hang in the
    kernel, where no signal reaches it). Returns how many processes there were."""
    found = members(job, sessions, keep)
    count = len(found)
    if found and grace > 0:
        send(found, signal.SIGTERM)
    patience, limit = time.monotonic() + grace, time.monotonic() + grace + 5
    while found and time.monotonic() < limit:
        if time.monotonic() >= patience:
            send(found, signal.SIGKILL)
        time.sleep(0.02)
        found = members(job, sessions, keep)
    return count


def kill_sessions(sessions: Collection[int]) -> None:
    """SIGKILL to every process in these sessions."""
    found = [int(name) for name in os.listdir("/proc") if name.isdigit() and _session(name) in sessions]
    send([pid for pid in found if pid != os.getpid()], signal.SIGKILL)
