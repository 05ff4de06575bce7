"""The launcher's own process: starts a node on each host, shows what the ranks write and their first failure, and sees that
all of the job ends.

It imports no torch and runs one loop over the links, signals and deadlines. Who guards whom: a node ends its host's part when
the launcher is gone or silent, an agent when its node is, the kernel a rank when its agent is; and the launcher ends the job
when any of them is.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
import uuid
from collections.abc import Callable

from zeroengine.launcher.crew import Crew
from zeroengine.launcher.failures import RankEnd, signal_name
from zeroengine.launcher.link import Message, Output
from zeroengine.launcher.localrun import SLACK
from zeroengine.launcher.member import Member
from zeroengine.launcher.outputs import HELD_LINE, Outputs
from zeroengine.launcher.plan import Job
from zeroengine.launcher.reach import peer
from zeroengine.launcher.rounds import Fault, Round, code_of, describe
from zeroengine.launcher.signals import Signals

_BROKEN_PIPE = 128 + signal.SIGPIPE
_LAST_MOMENTS = 4.0  # for a node that was told to end, beyond its ranks' grace and slack


class Supervisor:
    """One launch."""

    def __init__(self, job: Job) -> None:
        self._job, self._plan = job, job.plan
        self._id = uuid.uuid4().hex
        self._round: Round | None = None
        self._number = 0
        self._restarts = 0  # after failures; a change of hosts is none
        self._ending: float | None = None  # when the hosts were told to end
        self._killed = False
        self._code = 0
        self._said: set[str] = set()
        self._turned = time.monotonic()

    def run(self) -> int:
        """The job's exit code, when nothing of it is left."""
        self._outputs = Outputs(self._plan, self._job.logs, self._attend)
        try:
            if (known := self._known_ranks()) is not None:
                self._outputs.expect(range(known))
            with Signals() as self._signals:
                self._crew = Crew(self._job, self._id, self._outputs)
                if self._crew.far:
                    self._signals.never_stop()
                return self._until_the_end()
        finally:
            self._outputs.close()

    def _until_the_end(self) -> int:
        try:
            self._crew.start()
            try:
                self._loop()
                self._outputs.finish()
                return self._conclude()
            except BrokenPipeError:  # whoever read our output is gone, and with it the end of what there was to say
                self._outputs.mute()
                self._end(_BROKEN_PIPE)
                self._crew.tell_all({"do": "kill"})
                self._loop()
                return _BROKEN_PIPE
        finally:
            self._crew.close()

    def _known_ranks(self) -> int | None:
        slots = [len(host.slots) if host.slots is not None else self._plan.nproc for host in self._job.hosts]
        return sum(slots) if all(slots) and self._job.transport != "none" else None

    def _loop(self) -> None:
        while not (self._ending is not None and self._crew.all_gone()):
            holding = self._outputs.holding or (self._round is not None and self._round.holding)
            with selectors.DefaultSelector() as selector:
                selector.register(self._signals.wakeup, selectors.EVENT_READ)
                self._crew.register(selector)
                ready = selector.select(HELD_LINE if holding or self._ending else 0.25)
            for key, _ in ready:
                if key.fd == self._signals.wakeup:
                    os.read(key.fd, 4096)
                else:
                    self._read(key.data)
            self._outputs.flush_held()
            self._attend()
            self._advance()
            if self._ending is not None and time.monotonic() > self._ending + self._plan.grace + SLACK + _LAST_MOMENTS:
                return

    def _read(self, source: Callable[[], None] | Member) -> None:
        if not isinstance(source, Member):
            source()
            return
        frames = source.read()
        for frame in frames or ():
            if isinstance(frame, Output):
                if self._round is not None and source.index in self._round.running:
                    self._outputs.feed(self._round.base(source) + frame.local_rank, frame.stream, frame.data)
            else:
                self._take(source, frame)
        if frames is None:
            self._crew.ended(source, "its node ended, or the connection to it broke")

    def _take(self, member: Member, event: Message) -> None:
        if event["event"] == "ready" and (said := event["said"]) and said not in self._said:
            self._said.add(said)
            self._outputs.say(said if not member.remote else f"{member.name}: {said}")
        if event["event"] == "asked":
            self._signals.ask(event["number"])
        elif self._crew.take(member, event):
            return
        elif self._round is not None and event["attempt"] == self._round.number:
            self._round.take(member, event, self._crew.address)

    def _attend(self) -> None:
        """What cannot wait, even while the console takes nothing."""
        now, signals = time.monotonic(), self._signals
        if now > self._turned + 1.0:  # this process did not run: that hosts seem silent since then means nothing
            self._crew.excuse()
        self._turned = now
        if signals.first is not None and self._ending is None:
            self._end(128 + signals.first, signals.first)
        while signals.passed_on:
            self._crew.tell_all({"do": "signal", "number": signals.passed_on.pop()})
        if signals.kill_now and not self._killed:
            self._killed = True
            self._crew.tell_all({"do": "kill"})
        self._crew.beat(now)

    def _end(self, code: int, number: int = signal.SIGTERM) -> None:
        """Tells all hosts to end what they run, and themselves."""
        self._code, self._ending = code, time.monotonic()
        self._crew.end(code, number)

    def _advance(self) -> None:
        """Moves the job on, as far as it can be moved now."""
        for member in self._crew.newly_lost():
            if self._round is not None:
                self._round.lose(member, member.heard)
        if self._signals.first is not None and "signal" not in self._said:
            self._said.add("signal")
            name, grace = signal_name(self._signals.first), self._plan.grace
            self._outputs.say(f"{name}: ending the ranks (up to {grace:g} s; once more kills them at once)")
        if self._ending is not None:
            return
        if self._round is not None:
            self._advance_round(self._round)
        elif self._crew.gather():
            self._begin()
        elif self._crew.hopeless:
            for text in self._crew.hopeless:
                self._outputs.say(f"error: {text}")
            self._end(1)

    def _begin(self) -> None:
        last = self._restarts >= self._plan.max_restarts and not self._job.elastic
        self._round = Round(self._number, self._crew.chosen, last)
        self._outputs.expect(range(self._round.world) if self._job.transport != "none" else range(0))
        if self._number and len(self._round.members) > 1 or self._job.elastic:
            hosts = len(self._round.members)
            self._outputs.say(f"{self._round.world} ranks on {hosts} host{'s' * (hosts > 1)} (attempt {self._number})")
        peers = [peer(member, self._round.members, self._crew.address) for member in self._round.members]
        port = self._plan.master_port if self._job.transport != "none" else 0  # there it is the launcher's own
        self._round.begin(self._crew.address, self._job.interface or "", peers, port, self._job.connect_timeout / 2)

    def _advance_round(self, round_: Round) -> None:
        now = time.monotonic()
        if round_.holding and round_.settled(now):
            self._judge(round_)
            round_.stop()
        if round_.succeeded:
            self._end(0)
            return
        if self._job.elastic and not round_.failed and not round_.resized and self._crew.can_grow(round_.members):
            round_.resized = True
            self._outputs.say("a host has joined: the ranks end with grace and start again with it")
            round_.stop()
        if not round_.running:
            self._after(round_)

    def _judge(self, round_: Round) -> None:
        """Shows the cause of the attempt's failure, once."""
        cause = round_.cause()
        if cause is None or round_.reported is not None:
            return
        round_.reported = cause
        if isinstance(cause, RankEnd) and cause.error is not None and cause.error.text:
            self._outputs.log_error(cause.rank, cause.error.text)
        self._show(describe(cause))

    def _show(self, text: str) -> None:
        """To the user, on every console that is his."""
        self._outputs.say(text)
        if self._job.transport == "none":
            self._crew.tell_all({"do": "say", "text": text})

    def _after(self, round_: Round) -> None:
        """No host runs this attempt any more: the next one, or the end."""
        if not round_.failed and not round_.resized and not all(r["status"] == "ok" for r in round_.results.values()):
            round_.fail(Fault("", "error: the ranks ended without a word", 1, time.monotonic()))
        self._judge(round_)
        cause = round_.reported
        if cause is None and not round_.resized:
            return  # ranks of other hosts are still to be heard of
        lost = isinstance(cause, Fault) and cause.lost
        free = round_.resized or (lost and self._job.elastic)
        if not free and (self._restarts >= self._plan.max_restarts or (isinstance(cause, Fault) and cause.code == 2)):
            self._end(code_of(cause) if cause is not None else 1)
            return
        if not free:
            self._restarts += 1
            self._show(f"restarting all ranks ({self._restarts} of {self._plan.max_restarts} restarts)")
        elif lost:
            self._show("going on with the hosts that are left, from the latest checkpoint")
        self._number += 1
        self._round = None
        self._crew.regroup()

    def _conclude(self) -> int:
        """Says what is still to be said, when all has ended; returns the exit code."""
        round_ = self._round
        if self._signals.first is not None:
            if round_ is not None and round_.reported is None:
                self._tell_late_failure(round_, self._signals.first)
            if round_ is not None and round_.reported is not None and round_.last:
                return code_of(round_.reported)
            return 128 + self._signals.first
        if round_ is not None and round_.reported is not None and self._code:
            for end in round_.attempt.ends.values():
                if end is not round_.reported and end.error is not None and end.error.text:
                    self._outputs.log_error(end.rank, end.error.text)
            if after := round_.consequences(round_.reported):
                self._outputs.say(after)
        return self._code

    def _tell_late_failure(self, round_: Round, number: int) -> None:
        """A rank that raised while it was ended: a checkpoint that could not be written on SIGTERM, for instance."""
        late = [e for e in round_.attempt.ends.values() if e.error is not None and e.error.kind == "exception" and not e.error.peer]
        for end in sorted(late, key=lambda end: end.time)[:1]:
            if end.error is not None:
                self._outputs.log_error(end.rank, end.error.text)
                self._outputs.say(f"rank {end.rank} failed while {signal_name(number)} ended the job:\n{end.error.text.rstrip()}")
