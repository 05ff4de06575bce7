"""Inside the agent: learns at once when a rank starts, fails or ends, says so, and ends what is left in time.

torch's agent polls the ranks in order of their index and waits up to 30 s for one that ignores SIGTERM. Here a thread
for each rank waits for its end, so that the time of death is known whatever the order, and a bound is kept.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from zeroengine.launcher import processes

Event = dict[str, Any]


def _was_collected(pid: int) -> bool:
    """True once torch's agent has taken a rank's exit status. It signals the others only after that, while the thread
    that waits for the same rank here may not have had its turn yet."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def _record(path: str) -> Event | None:
    """What a rank wrote of its failure: the file is on this host, who shows it may be on another."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


class RankWatch:
    """Reads what ranks tell through the pipe `events` of the run's folder and hands every event on to `forward`."""

    def __init__(self, run_dir: str, job: str, grace: float, forward: Callable[[Event], None]) -> None:
        self._job, self._grace, self._forward = job, grace, forward
        self._lock = threading.Lock()
        self._pids: dict[int, dict[int, int]] = {}  # attempt -> rank -> pid
        self._failed: set[int] = set()  # attempts of which a rank has failed
        self._ended: dict[int, dict[int, tuple[int, float]]] = {}  # attempt -> rank -> status and when, as far as seen here
        self._killed: set[int] = set()  # attempts that were killed from here
        # Opened for both directions (Linux), so that it never reads as ended while no rank has it open.
        self._pipe = os.fdopen(os.open(os.path.join(run_dir, "events"), os.O_RDWR), "rb", buffering=0)
        threading.Thread(target=self._read, name="rank events", daemon=True).start()

    @property
    def sessions(self) -> set[int]:
        """Process ids of all ranks so far; each leads a session of the same number."""
        with self._lock:
            return {pid for ranks in self._pids.values() for pid in ranks.values()}

    def _read(self) -> None:
        rest = b""
        while True:
            rest += self._pipe.read(65536) or b""
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, event: Event) -> None:
        if event["event"] == "start":
            with self._lock:
                self._pids.setdefault(event["attempt"], {})[event["rank"]] = event["pid"]
        elif event["event"] == "error":
            event["record"] = _record(event.pop("file"))
        self._forward(event)
        if event["event"] == "start":
            waiter = threading.Thread(target=self._wait, args=(event,), name=f"rank {event['rank']}", daemon=True)
            waiter.start()
        elif event["event"] == "error":
            self._fail(event["attempt"])

    def _wait(self, start: Event) -> None:
        try:
            # WNOWAIT leaves the exit status to torch's agent, which collects it in its own time.
            end = os.waitid(os.P_PID, start["pid"], os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # torch was first, and reports the status in its result
            self._forward({**start, "event": "collected", "time": time.monotonic()})
            return
        when = time.monotonic()
        if end is None:
            return
        status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        stopped = self._was_stopped(start, status, when)
        self._forward({**start, "event": "exit", "status": status, "time": when, "stopped": stopped})
        if status != 0:
            self._fail(start["attempt"])

    def _was_stopped(self, start: Event, status: int, when: float) -> bool:
        """True if the rank ended because it was told to: by torch, once another had ended badly, or from here."""
        attempt, rank = start["attempt"], start["rank"]
        with self._lock:
            known = self._ended.setdefault(attempt, {})
            known[rank] = status, when
            if status == -signal.SIGKILL:
                return attempt in self._killed
            earlier = any(bad != 0 and then < when for bad, then in known.values())
            unseen = any(r not in known and _was_collected(pid) for r, pid in self._pids[attempt].items())
            return status == -signal.SIGTERM and (earlier or unseen)

    def _fail(self, attempt: int) -> None:
        """Sees to it that after `grace` seconds no process of an attempt is left of which a rank has failed."""
        with self._lock:
            if attempt in self._failed:
                return
            self._failed.add(attempt)
        timer = threading.Timer(self._grace, self._kill, args=(attempt,))
        timer.daemon = True
        timer.start()

    def _kill(self, attempt: int) -> None:
        with self._lock:
            sessions = set(self._pids.get(attempt, {}).values())
            self._killed.add(attempt)
        processes.kill_sessions(sessions)
