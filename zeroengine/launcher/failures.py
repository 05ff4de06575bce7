"""How ranks ended, and which of them is the cause. No processes here: records go in, a verdict and a text come out."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ErrorRecord:
    """What a rank's program said of its own failure. `time` is the launcher's monotonic clock, in seconds."""

    kind: str  # "exception", "exit" or "interrupt"
    title: str
    code: int
    text: str  # the traceback; empty for "exit" and "interrupt"
    peer: bool  # it blames another rank
    time: float

    @staticmethod
    def of(record: dict[str, Any] | None, offset: float) -> ErrorRecord | None:
        """The record that a rank wrote, its time moved by `offset` to the launcher's clock."""
        try:
            error = ErrorRecord(**record) if record is not None else None
        except TypeError:  # written by something else
            return None
        return error and replace(error, time=error.time + offset)


@dataclass
class RankEnd:
    """One rank of one attempt. `status` is the exit code, or minus the signal that killed it; None while it runs."""

    rank: int
    pid: int
    status: int | None = None
    ended: float | None = None
    error: ErrorRecord | None = None
    stopped: bool = False  # it was running when the job began to be stopped
    host: str = ""

    @property
    def failed(self) -> bool:
        return self.error is not None or self.status not in (None, 0)

    @property
    def time(self) -> float:
        times = [t for t in (self.error.time if self.error else None, self.ended) if t is not None]
        return min(times, default=float("inf"))

    @property
    def by_itself(self) -> bool:
        return self.failed and not (self.error is not None and self.error.peer)

    @property
    def exit_code(self) -> int:
        """As a shell would give it: 128 + the number of the signal. What the program meant comes before what became of
        its process, which may have been killed because it did not end."""
        if self.error is not None:
            return self.error.code or 1
        if self.status is not None and self.status < 0:
            return 128 - self.status
        return self.status or 1

    def how(self) -> str:
        if self.error is not None and self.error.text == "" and self.error.kind == "exit":
            return f"exit code {self.exit_code}, {self.error.title}"
        if self.error is not None:
            return f"exit code {self.exit_code}"
        if self.status is not None and self.status < 0:
            return f"killed by {signal_name(-self.status)}"
        return f"exit code {self.exit_code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(ends: list[RankEnd]) -> RankEnd | None:
    """The rank that failed first by the clock; one that blames a peer only where no rank failed by itself."""
    failed = [end for end in ends if end.failed and not end.stopped]
    by_itself = [end for end in failed if end.by_itself]
    return min(by_itself or failed, key=lambda end: (end.time, end.rank), default=None)


@dataclass
class Attempt:
    """All ranks of one start of the job."""

    number: int
    ends: dict[int, RankEnd] = field(default_factory=dict)

    def take(self, event: dict[str, Any], host: str = "", offset: float = 0.0, told: bool = False) -> RankEnd:
        """One event of an agent: start, error or exit of a rank, or that torch's agent collected it first and its status
        is still to come. `offset` leads from the host's clock to the launcher's; `told`: the host had been told to end its ranks."""
        end = self.ends.setdefault(event["rank"], RankEnd(event["rank"], event["pid"], host=host))
        if event["event"] == "error":
            end.error = ErrorRecord.of(event["record"], offset)
        elif event["event"] == "exit":
            end.status, end.ended = event["status"], event["time"] + offset
            end.stopped = event.get("stopped", False) or (told and end.status in (-signal.SIGTERM, -signal.SIGKILL))
        elif event["event"] == "collected":
            end.ended = event["time"] + offset
        return end

    def fill_in(self, known: list[dict[str, Any]], host: str, now: float, told: bool) -> list[RankEnd]:
        """Ends of which only the statuses are known, for torch's agent collected them before anyone saw when: those of
        `known` that no event told. Returns them. The agent ends the others with SIGTERM, and SIGKILL later, once one has
        failed: a rank killed so counts as stopped only where another is the cause, so that one always is."""
        unseen = [e for e in known if self.ends.get(e["rank"], RankEnd(e["rank"], e["pid"])).status is None]
        gentle = {-signal.SIGTERM: 2, -signal.SIGKILL: 1}
        filled = []
        for event in sorted(unseen, key=lambda e: (gentle.get(e["status"], 0), e["rank"])):
            caused = told or any(end.failed and not end.stopped for end in self.ends.values())
            end = self.ends.setdefault(event["rank"], RankEnd(event["rank"], event["pid"], host=host))
            end.status, end.ended = event["status"], end.ended or now
            end.stopped = caused and event["status"] in gentle and end.error is None
            filled.append(end)
        return filled

    @property
    def first(self) -> RankEnd | None:
        return first_failure(list(self.ends.values()))


_SIGNAL_HINTS = {
    signal.SIGKILL: "Somebody killed it, or the kernel did for lack of memory (see dmesg): try a smaller batch.",
    signal.SIGSEGV: "It crashed in native code; the Python stack above, if any, says where.",
    signal.SIGBUS: "It crashed in native code, or shared memory is full (see df /dev/shm).",
    signal.SIGABRT: "Native code gave up; its last words are above.",
}


def report(first: RankEnd) -> str:
    """What the user sees of the failure: who, where, how, the traceback."""
    head = f"rank {first.rank} failed first (host {first.host}, pid {first.pid}, {first.how()})"
    if first.error is not None and first.error.text:
        return f"{head}:\n{first.error.text.rstrip()}"
    hint = _SIGNAL_HINTS.get(signal.Signals(-first.status)) if first.status and -first.status in _SIGNAL_HINTS else None
    return f"{head}. {hint}" if hint else f"{head}."


def later_errors(ends: Iterable[RankEnd]) -> list[str]:
    """One line on each of these ranks that failed with words of its own, in the order of their ends."""
    return [
        f"rank {end.rank} failed after it: {end.error.title.splitlines()[0]}"
        for end in sorted(ends, key=lambda end: end.time)
        if end.error is not None and end.error.kind == "exception"
    ]


def aftermath(first: RankEnd, ends: list[RankEnd]) -> str:
    """One line on each other rank that failed with words of its own, and one on those that were ended."""
    others = [end for end in ends if end is not first]
    lines = later_errors(others)
    quiet = [str(end.rank) for end in others if end.error is None and end.status != 0]
    if quiet:
        lines.append(f"ended rank{'s' if len(quiet) > 1 else ''} {', '.join(sorted(quiet, key=int))}")
    return "\n".join(lines)
