"""One attempt on this host: the pipes of its ranks, the agent that runs them, and the end of both."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import processes
from zeroengine.launcher.link import Message, Output
from zeroengine.launcher.plan import Part, Plan

# Beyond the grace period, for the agent to end what it started; then everything is killed from here.
SLACK = 1.5
ROOT = str(Path(__file__).resolve().parents[2])
# Runs a module of this package without the current folder on the module path, where a file of the user's could hide a
# library's. No character in it means anything to a shell between single quotes, or between double quotes.
START = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; sys.path.append(sys.argv[1]); "
    "from zeroengine.launcher.{module} import main; sys.exit(main(sys.argv[2:]))"
)


def run_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder for the pipes between node, agent and ranks."""
    try:
        return tempfile.TemporaryDirectory(prefix="zerorun-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ZeroEngineError(f"no folder for temporary files can be made: {error}; set TMPDIR to one") from None


class RankPipes:
    """The named pipes that the ranks of this host write to: their output, and `events`, which the agent reads."""

    def __init__(self, folder: str, nproc: int) -> None:
        os.mkfifo(os.path.join(folder, "events"), 0o600)
        self._pipes: dict[int, tuple[int, int]] = {}  # fd -> (stream, local rank)
        for rank in range(nproc):
            for stream, kind in ((1, "out"), (2, "err")):
                path = os.path.join(folder, f"{kind}.{rank}")
                os.mkfifo(path, 0o600)
                # Opened for both directions (Linux), so that it does not end while a rank restarts.
                self._pipes[os.open(path, os.O_RDWR | os.O_NONBLOCK)] = stream, rank

    @property
    def fds(self) -> list[int]:
        return list(self._pipes)

    def read(self, fd: int) -> Output | None:
        """Some of what is there; None when nothing is."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return None
        stream, rank = self._pipes[fd]
        return Output(stream, rank, data)

    def close(self) -> None:
        for fd in self._pipes:
            os.close(fd)


class LocalRun:
    """One attempt on this host, from the start of its agent until no process of it is left.

    `read` and `step` are called by a loop; nothing here waits.
    """

    def __init__(self, plan: Plan, part: Part, folder: str, mark: str, env: Mapping[str, str]) -> None:
        self.attempt = part.attempt
        self._mark, self._grace = mark, plan.grace
        self._sessions: set[int] = set()  # of the ranks, by process id
        self._ready = False  # the agent handles signals; before, it would end with a traceback
        self._told: float | None = None  # when it was told to end
        self._rest = b""
        self._ending: processes.Ending | None = None
        settings = {"plan": dataclasses.asdict(plan), "part": dataclasses.asdict(part)}
        path = Path(folder, "plan.json")
        path.touch(0o600)
        path.write_text(json.dumps(settings))
        self.events, events = os.pipe()
        lifeline, self._lifeline = os.pipe()
        self.agent = subprocess.Popen(
            [sys.executable, "-c", START.format(module="agent"), ROOT, str(lifeline), str(events)],
            env={**env, "ZERORUN_DIR": folder, processes.MARK: mark},
            pass_fds=(lifeline, events),
            start_new_session=True,
        )
        os.close(events)
        os.close(lifeline)

    def meet(self, address: str, port: int) -> None:
        """Tells the agent where the attempt's store is."""
        try:
            os.write(self._lifeline, json.dumps({"address": address, "port": port}).encode() + b"\n")
        except OSError:  # the agent is gone, which its events tell
            return

    def read(self) -> list[Message]:
        """Events of agent and ranks. When the agent is gone, what is left of its processes begins to end."""
        data = os.read(self.events, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages: list[Message] = [json.loads(line) for line in lines]
        for message in messages:
            if message["event"] == "ready":
                self._ready = True
            elif message["event"] == "start":
                self._sessions.add(message["pid"])
        if not data and self._ending is None:
            self._end(min(1.0, self._grace))
        return [message for message in messages if message["event"] != "ready"]

    @property
    def ending(self) -> bool:
        return self._ending is not None

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Asks agent and ranks to end; they have the grace period for it. A second call changes nothing."""
        if self._told is None and self._ending is None:
            self._told = time.monotonic()
            processes.send([self.agent.pid], signal.Signals(number if self._ready else signal.SIGTERM))

    def kill(self) -> None:
        """Ends everything without grace."""
        if self._ending is None:
            self._end(0.0)
        else:
            self._ending.hasten()

    def signal_ranks(self, number: int) -> None:
        """Passes a signal on to the ranks alone."""
        processes.send(self._sessions, signal.Signals(number))

    def _end(self, grace: float) -> None:
        self._ending = processes.Ending(self._mark, self._sessions, grace)

    def step(self) -> bool:
        """True when nothing of the attempt is left on this host."""
        if self._ending is None and self._told is not None and time.monotonic() > self._told + self._grace + SLACK:
            self._end(0.0)
        return self._ending is not None and self._ending.step()

    def close(self) -> int:
        """After the end: the agent's exit status."""
        status = self.agent.wait()
        os.close(self._lifeline)
        os.close(self.events)
        return status
