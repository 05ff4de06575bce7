"""The launcher's own process: shows the ranks' output and their first failure, and sees that all of the job ends.

It imports no torch and runs one loop over the ranks' output, the agent's events, signals and deadlines. Two processes
guard the ranks, this one and the agent (see agent.py): whichever dies, the other ends the job.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import processes
from zeroengine.launcher.console import Screen, Stream, screens
from zeroengine.launcher.failures import Attempt, RankEnd, aftermath, report, signal_name
from zeroengine.launcher.plan import Plan

# Failures within this many seconds of the first that is seen are compared before one is called the first.
_SETTLE = 0.3
# Beyond the grace period, for the agent to end what it started; then everything is killed from here.
_SLACK = 1.5
# Signals that arrive together are one: a terminal and a wrapper may both pass on the same Ctrl-C.
_SAME_SIGNAL = 0.5
_HELD_LINE = 0.1  # seconds after which an unfinished line is shown
_BROKEN_PIPE = 128 + signal.SIGPIPE
# Runs the agent without the current folder on the module path, where a file of the user's could hide a library's.
_AGENT = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; sys.path.append(sys.argv[1]); "
    "from zeroengine.launcher.agent import main; sys.exit(main(int(sys.argv[2]), int(sys.argv[3])))"
)


class Outputs:
    """The named pipes that ranks write to, each with the stream that shows it."""

    def __init__(self, plan: Plan, run_dir: str, out: Screen, err: Screen, logs: Path | None) -> None:
        self._streams: dict[int, Stream] = {}
        self._errors: dict[int, Stream] = {}
        for rank in range(plan.nproc):
            seen = (logs is None or plan.tee) and (plan.show is None or rank in plan.show)
            prefix = f"[rank{rank}] " if plan.prefix else ""
            for kind, screen in (("out", out), ("err", err)):
                path = os.path.join(run_dir, f"{kind}.{rank}")
                os.mkfifo(path, 0o600)
                stream = Stream(screen if seen else None, prefix, logs / f"rank{rank}.{kind}" if logs else None)
                # Opened for both directions (Linux), so that it does not end while a rank restarts.
                self._streams[os.open(path, os.O_RDWR | os.O_NONBLOCK)] = stream
                if kind == "err":
                    self._errors[rank] = stream
        self._held: dict[Stream, float] = {}

    @property
    def fds(self) -> list[int]:
        return list(self._streams)

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def read(self, fd: int) -> bool:
        """Takes what is there, some of it at a time; False when nothing was."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        stream = self._streams[fd]
        stream.feed(data)
        self._held.pop(stream, None)
        if stream.waiting:
            self._held[stream] = time.monotonic()
        return True

    def flush_held(self) -> None:
        """Shows unfinished lines that have waited long enough for their end: prompts, progress bars."""
        due = [s for s, since in self._held.items() if time.monotonic() - since >= _HELD_LINE]
        for stream in due:
            stream.flush()
            del self._held[stream]

    def log_error(self, rank: int, text: str) -> None:
        """Adds to the error file of a rank what the launcher shows in its place."""
        if rank in self._errors:
            self._errors[rank].log(text.encode(errors="backslashreplace") + b"\n")

    def drain(self) -> None:
        """Shows all that is left, when no rank is."""
        for fd, stream in self._streams.items():
            while self.read(fd):
                continue
            stream.flush()

    def close(self) -> None:
        for fd, stream in self._streams.items():
            stream.close()
            os.close(fd)


class Signals:
    """Signals to the launcher: the first ends the job with grace, one more, later, kills it."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.first_time = 0.0
        self.kill_now = False
        self.agent: int | None = None  # its process id, once there is one
        self.ready = False  # the agent handles signals; before, it would end with a traceback
        self.wakeup, self._write = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.wakeup)
        os.close(self._write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The agent is told from here and not from the loop: the loop may wait for a console that has been stopped.
        if self.first is None:
            self.first, self.first_time = number, time.monotonic()
            if self.agent is not None:
                processes.send([self.agent], signal.Signals(number if self.ready else signal.SIGTERM))
        elif time.monotonic() - self.first_time > _SAME_SIGNAL:
            self.kill_now = True


def run_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder for the pipes between launcher, agent and ranks."""
    try:
        return tempfile.TemporaryDirectory(prefix="zerorun-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ZeroEngineError(f"no folder for temporary files can be made: {error}; set TMPDIR to one") from None


class Supervisor:
    """One launch on this node. `say` shows a line of the launcher's own."""

    def __init__(self, plan: Plan, say: Callable[[str], None], logs: Path | None = None) -> None:
        self._plan, self._say, self._logs = plan, say, logs
        self._job = uuid.uuid4().hex
        self._attempts: dict[int, Attempt] = {}
        self._reported: dict[int, RankEnd] = {}  # attempt -> the rank shown as its cause
        self._settled: float | None = None  # when the failure of the latest attempt may be judged
        self._failed_at: float | None = None  # when the last attempt that may be made failed
        self._result: dict[str, Any] | None = None
        self._events = b""
        self._signals = Signals()

    def run(self) -> int:
        """Starts the ranks and returns the job's exit code when nothing of the job is left."""
        out, err = screens()
        with run_folder() as run_dir, self._signals as signals:
            outputs = Outputs(self._plan, run_dir, out, err, self._logs)
            Path(run_dir, "plan.json").write_text(self._plan.to_json())
            os.mkfifo(os.path.join(run_dir, "events"), 0o600)
            broken = False
            try:
                agent, events, lifeline = self._start_agent(run_dir, signals)
                try:
                    self._loop(outputs, events, signals)
                except BrokenPipeError:
                    broken = True
                finally:
                    quiet = broken or signals.kill_now or self._killed(signals)
                    processes.end_all(self._job, self._sessions, 0.0 if quiet else min(1.0, self._plan.grace))
                    agent_status = agent.wait()
                    os.close(lifeline)
                    os.close(events)
                if broken:
                    return _BROKEN_PIPE
                outputs.drain()
                return self._conclude(outputs, signals, agent_status)
            except BrokenPipeError:  # whoever read our output is gone, and with it the end of what there was to say
                return _BROKEN_PIPE
            finally:
                outputs.close()

    def _start_agent(self, run_dir: str, signals: Signals) -> tuple[subprocess.Popen[bytes], int, int]:
        events, events_of_agent = os.pipe()
        lifeline_of_agent, lifeline = os.pipe()
        root = str(Path(__file__).resolve().parents[2])
        agent = subprocess.Popen(
            [sys.executable, "-c", _AGENT, root, str(lifeline_of_agent), str(events_of_agent)],
            env={**os.environ, "ZERORUN_DIR": run_dir, processes.MARK: self._job},
            pass_fds=(lifeline_of_agent, events_of_agent),
            start_new_session=True,
        )
        os.close(events_of_agent)
        os.close(lifeline_of_agent)
        signals.agent = agent.pid
        if signals.first is not None:  # it came before there was anybody to pass it on to
            processes.send([agent.pid], signal.SIGTERM)
        return agent, events, lifeline

    def _loop(self, outputs: Outputs, events: int, signals: Signals) -> None:
        """Until the agent is gone or time is up."""
        with selectors.DefaultSelector() as selector:
            for fd in (*outputs.fds, events, signals.wakeup):
                selector.register(fd, selectors.EVENT_READ)
            told = False
            while True:
                for key, _ in selector.select(_HELD_LINE if outputs.holding or self._settled else 0.5):
                    if key.fd == signals.wakeup:
                        os.read(key.fd, 4096)
                    elif key.fd == events:
                        if not self._read_events(events):
                            return
                    else:
                        outputs.read(key.fd)
                outputs.flush_held()
                if signals.first is not None and not told:
                    told = True
                    name = signal_name(signals.first)
                    self._say(f"{name}: ending the ranks (up to {self._plan.grace:g} s; once more kills them at once)")
                if self._settled is not None and time.monotonic() >= self._settled and signals.first is None:
                    self._judge(outputs)
                if signals.kill_now or self._killed(signals):
                    return

    def _killed(self, signals: Signals) -> bool:
        """True when those who were to end have had their time."""
        since = [t for t in (signals.first_time if signals.first else None, self._failed_at) if t is not None]
        return bool(since) and time.monotonic() > min(since) + self._plan.grace + _SLACK

    def _read_events(self, fd: int) -> bool:
        """Takes the agent's events; False when it is gone."""
        data = os.read(fd, 65536)
        *lines, self._events = (self._events + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "ready":
                self._signals.ready = True
                continue
            if event["event"] == "result":
                self._result = event
                continue
            attempt = self._attempts.setdefault(event["attempt"], Attempt(event["attempt"]))
            attempt.take(event)
            if attempt.first is not None and attempt.number not in self._reported:
                self._notice(attempt)
        return bool(data)

    def _notice(self, attempt: Attempt) -> None:
        if self._signals.first is not None:  # an end that was asked for, however it looks
            return
        if attempt.number >= self._plan.max_restarts and self._failed_at is None:
            self._failed_at = time.monotonic()
        # While only ranks that blame another have failed, the cause is still to come: it is judged at the end.
        if self._settled is None and attempt.first is not None and attempt.first.by_itself:
            self._settled = time.monotonic() + _SETTLE

    def _judge(self, outputs: Outputs) -> None:
        """Shows the cause of every attempt's failure that has not been shown."""
        self._settled = None
        for attempt in self._attempts.values():
            first = attempt.first
            if first is None or attempt.number in self._reported:
                continue
            self._reported[attempt.number] = first
            if first.error is not None and first.error.text:
                outputs.log_error(first.rank, first.error.text)
            self._say(report(first, socket.gethostname()))
            if attempt.number < self._plan.max_restarts:
                self._say(f"restarting all ranks ({attempt.number + 1} of {self._plan.max_restarts} restarts)")

    @property
    def _sessions(self) -> set[int]:
        return {end.pid for attempt in self._attempts.values() for end in attempt.ends.values()}

    def _complete(self) -> None:
        """Fills in from torch's result what the watch did not see: ranks that died before their first line of code."""
        for known in (self._result or {}).get("ends", []):
            attempt = self._attempts.setdefault(max(self._attempts, default=0), Attempt(0))
            end = attempt.ends.setdefault(known["rank"], RankEnd(known["rank"], known["pid"]))
            if end.status is None:
                end.status, end.ended = known["status"], time.monotonic()
                end.stopped = len(attempt.ends) > 1 and known["status"] in (-signal.SIGTERM, -signal.SIGKILL)

    def _conclude(self, outputs: Outputs, signals: Signals, agent_status: int) -> int:
        """Says what is still to be said, when all has ended; returns the exit code."""
        self._complete()
        result = self._result or {"status": "lost"}
        if signals.first is not None and self._failed_at is None:
            self._tell_late_failure(outputs, signals.first)
            return self._code(signals, 0)
        if result["status"] == "usage":
            self._say(f"error: {result['message']}")
            return 2
        self._judge(outputs)
        last = max(self._attempts, default=0)
        first = self._reported.get(last)
        if first is not None and result["status"] != "ok":
            ends = list(self._attempts[last].ends.values())
            for end in ends:
                if end is not first and end.error is not None and end.error.text:
                    outputs.log_error(end.rank, end.error.text)
            if after := aftermath(first, ends):
                self._say(after)
            return first.exit_code
        if result["status"] == "ok":
            return 0
        if result["status"] == "lost":
            how = f"killed by {signal_name(-agent_status)}" if agent_status < 0 else f"exit code {agent_status}"
            self._say(
                f"the agent that starts the ranks on {socket.gethostname()} ended ({how}); the ranks were ended too"
            )
            return 128 - agent_status if agent_status < 0 else agent_status or 1
        self._say(
            f"error: the ranks could not be run on {socket.gethostname()}: {result.get('message', result['status'])}"
        )
        return 1

    def _tell_late_failure(self, outputs: Outputs, number: int) -> None:
        """A rank that raised while it was ended: a checkpoint that could not be written on SIGTERM, for instance."""
        ends = [end for attempt in self._attempts.values() for end in attempt.ends.values()]
        late = [end for end in ends if end.error is not None and end.error.kind == "exception" and not end.error.peer]
        for end in sorted(late, key=lambda end: end.time)[:1]:
            if end.error is not None:
                outputs.log_error(end.rank, end.error.text)
                self._say(
                    f"rank {end.rank} failed while {signal_name(number)} ended the job:\n{end.error.text.rstrip()}"
                )

    @staticmethod
    def _code(signals: Signals, otherwise: int) -> int:
        return 128 + signals.first if signals.first is not None else otherwise
