"""One attempt of a job over its hosts: who is first, who failed, when the others are told to stop, and what the cause was."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from zeroengine.launcher.failures import Attempt, RankEnd, aftermath, later_errors, report, signal_name
from zeroengine.launcher.link import Message
from zeroengine.launcher.member import Member
from zeroengine.launcher.plan import Part

# Failures within this many seconds of the first that is seen are compared before one is called the first.
_SETTLE = 0.3
# While only ranks that blame another have failed, the cause is still to come; a rank that blames waits 2 s itself.
_BLAME = 3.0


@dataclass(frozen=True)
class Fault:
    """A failure that no rank can tell of: a host that is gone, an agent that died, ranks that could not be started."""

    host: str
    text: str
    code: int
    time: float  # of the launcher's clock
    lost: bool = False  # the host is gone


class Round:
    """The attempt with number `number` on `members`, in the order of their ranks."""

    def __init__(self, number: int, members: Sequence[Member], last: bool) -> None:
        self.number, self.members = number, tuple(members)
        self.last = last  # no further attempt may follow a failure
        self.attempt = Attempt(number)
        self.faults: list[Fault] = []
        self.results: dict[int, Message] = {}  # by index of the host
        self.running = {member.index: member for member in members}
        self.stopped_at: float | None = None  # when the hosts were told to stop
        self.reported: RankEnd | Fault | None = None
        self.resized = False  # stopped for a change of hosts, not for a failure
        self._seen: float | None = None  # when a failure was first seen
        self._blamed: float | None = None
        self._bases: dict[int, int] = {}
        base = 0
        for member in members:
            self._bases[member.index] = base
            base += member.nproc
        self.world = base

    def base(self, member: Member) -> int:
        """The rank of the host's first process."""
        return self._bases[member.index]

    def begin(self, address: str, interface: str, peers: Sequence[str], port: int, patience: float) -> None:
        """Starts the agents of all hosts; all but the first wait to hear where its store is."""
        for index, member in enumerate(self.members):
            part = Part(self.number, index, len(self.members), address, interface, peers[index], port, patience)
            member.send({"do": "start", "part": dataclasses.asdict(part), "base": self.base(member), "world": self.world})

    def take(self, member: Member, event: Message, address: str) -> None:
        """An event of this attempt from a host."""
        kind = event["event"]
        if kind == "port":
            for other in self.members[1:]:
                other.send({"do": "meet", "address": address, "port": event["port"]})
        elif kind == "result":
            self.results[member.index] = event
            self._take_result(member, event)
        elif kind == "stopped":
            self.running.pop(member.index, None)
            if member.index not in self.results and self.stopped_at is None:
                self._agent_died(member, event["agent"])
        else:
            told = self.stopped_at is not None
            end = self.attempt.take(event, member.name, member.offset, told)
            if end.failed and not end.stopped:
                self._notice(end.by_itself)

    def _take_result(self, member: Member, event: Message) -> None:
        told = self.stopped_at is not None
        for end in self.attempt.fill_in(event.get("ends", []), member.name, time.monotonic(), told):
            if end.failed and not end.stopped:
                self._notice(end.by_itself)
        if event["status"] in ("usage", "unreachable", "error"):
            text = event["message"] or "they could not be started"
            code = 2 if event["status"] == "usage" else 1
            where = "" if event["status"] == "unreachable" else f"the ranks could not be run on {member.name}: "
            self.fail(Fault(member.name, f"error: {text}" if code == 2 else f"error: {where}{text}", code, time.monotonic()))

    def _agent_died(self, member: Member, status: int) -> None:
        how = f"killed by {signal_name(-status)}" if status < 0 else f"exit code {status}"
        text = f"the agent that starts the ranks on {member.name} ended ({how}); the ranks were ended too"
        self.fail(Fault(member.name, text, 128 - status if status < 0 else status or 1, time.monotonic()))

    def lose(self, member: Member, when: float) -> None:
        """A host of this attempt is gone."""
        if self.running.pop(member.index, None) is not None:
            self.fail(Fault(member.name, f"host {member.name} is lost: {member.why}", 1, when, lost=True))

    def fail(self, fault: Fault) -> None:
        self.faults.append(fault)
        self._notice(True)

    def _notice(self, by_itself: bool) -> None:
        now = time.monotonic()
        self._blamed = self._blamed or now
        if by_itself:
            self._seen = self._seen or now

    @property
    def failed(self) -> bool:
        return self._blamed is not None

    def settled(self, now: float) -> bool:
        """True when it is time to call one failure the first, and to stop all others."""
        by_itself = self._seen is not None and now >= self._seen + _SETTLE
        return by_itself or (self._blamed is not None and now >= self._blamed + _BLAME)

    @property
    def holding(self) -> bool:
        """A failure waits to be judged."""
        return self.failed and self.reported is None

    def stop(self) -> None:
        """Tells the hosts to end their ranks, once."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            for member in self.running.values():
                member.send({"do": "stop", "attempt": self.number})

    @property
    def succeeded(self) -> bool:
        return len(self.results) == len(self.members) and all(r["status"] == "ok" for r in self.results.values())

    def cause(self) -> RankEnd | Fault | None:
        """The failure that came first by the clock; a rank that blames another only where nothing failed by itself."""
        rank = self.attempt.first
        fault = min(self.faults, key=lambda fault: fault.time, default=None)
        if rank is None or fault is None:
            return rank or fault
        if not rank.by_itself:
            return fault
        return rank if rank.time <= fault.time else fault

    def consequences(self, cause: RankEnd | Fault) -> str:
        """One line on each other failure, and one on the ranks that were ended."""
        ends = list(self.attempt.ends.values())
        lines = [f"after it, {fault.text}" for fault in self.faults if fault is not cause]
        if isinstance(cause, RankEnd):
            lines.append(aftermath(cause, ends))
        else:
            lines += later_errors(ends)
        return "\n".join(line for line in lines if line)


def describe(cause: RankEnd | Fault) -> str:
    """What the user sees of a failure."""
    return report(cause) if isinstance(cause, RankEnd) else cause.text


def code_of(cause: RankEnd | Fault) -> int:
    return cause.exit_code if isinstance(cause, RankEnd) else cause.code
