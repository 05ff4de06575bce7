"""All hosts of a job: who is started, who has come, who is lost, and which of them make the next attempt."""

from __future__ import annotations

import dataclasses
import hmac
import os
import selectors
import time
from collections.abc import Sequence
from functools import partial

from zeroengine import __version__
from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import dialling, network, processes
from zeroengine.launcher.hosts import Host
from zeroengine.launcher.link import Message, Writer, pack
from zeroengine.launcher.member import Member, State
from zeroengine.launcher.node import proof
from zeroengine.launcher.outputs import Outputs
from zeroengine.launcher.plan import Job
from zeroengine.launcher.reach import meeting_address
from zeroengine.launcher.transports import OneCommand, Transport, open_transport

_JOIN = 10.0  # seconds that an elastic job waits for hosts beyond its smallest number
_RETRY = 5.0  # seconds between attempts to get a lost host back


class Crew:
    """The members of a job, and the transport that reaches them."""

    def __init__(self, job: Job, job_id: str, outputs: Outputs) -> None:
        self._job, self._id, self._outputs = job, job_id, outputs
        self.members = [Member(index, host, self._is_remote(host)) for index, host in enumerate(job.hosts)]
        self._coming: list[Member] = []  # connections that have not said who they are
        self._transport: Transport = open_transport(job)
        self._nonces: dict[Member, str] = {}
        self._lost: list[Member] = []
        self._words = b""  # of a transport that serves all hosts
        self._began = time.monotonic()
        self._beat_at = self._retry_at = self._enough_since = 0.0
        self._ending = False
        self.chosen: list[Member] = []
        self.address = ""
        self.hopeless: list[str] = []  # why the job cannot be run at all

    def _is_remote(self, host: Host) -> bool:
        if self._job.transport in ("local", "none"):
            return False
        return self._job.transport != "ssh" or host.user is not None or host.port is not None or not network.is_local(host.name)

    @property
    def far(self) -> bool:
        """True where other hosts take part, or may."""
        return self._job.transport != "local" and (self._job.transport == "none" or any(m.remote for m in self.members))

    def start(self) -> None:
        self._transport.start(self.members)

    # What comes in.

    def register(self, selector: selectors.BaseSelector) -> None:
        """Registers all that may become ready; the data of a key is a member to be read, or a function to call."""
        for member in (*self.members, *self._coming):
            if member.inbound is not None:
                selector.register(member.inbound, selectors.EVENT_READ, member)
            if member.errors is not None:
                selector.register(member.errors, selectors.EVENT_READ, partial(self._read_errors, member))
            if member.writer is not None and member.writer.waiting:
                selector.register(member.writer.fd, selectors.EVENT_WRITE, member.writer.flush)
        if self._transport.listener is not None:
            selector.register(self._transport.listener, selectors.EVENT_READ, self._accept)
        process = self._transport.process
        if process is not None and process.stdout is not None and not process.stdout.closed:
            selector.register(process.stdout, selectors.EVENT_READ, self._read_transport)

    def _read_errors(self, member: Member) -> None:
        data = member.read_errors()
        if data and member.state is State.READY and not self._ending:
            self._outputs.pass_on(b"".join(f"[{member.name}] ".encode() + line for line in data.splitlines(keepends=True)))

    def _read_transport(self) -> None:
        process = self._transport.process
        if process is None or process.stdout is None:
            return
        data = os.read(process.stdout.fileno(), 65536)
        self._words = (self._words + data)[-4096:]
        if not data:
            process.stdout.close()
        elif self.chosen and not self._ending:
            self._outputs.pass_on(data)

    def _accept(self) -> None:
        if self._transport.listener is None:
            return
        try:
            connection, peer = self._transport.listener.accept()
        except OSError:  # it went away in the same moment
            return
        dialling.keep_alive(connection)
        member = Member(-1, Host(str(peer[0])), True)
        member.address = str(peer[0]).removeprefix("::ffff:")
        inbound = connection.detach()
        member.attach(inbound, Writer(os.dup(inbound)))
        if self._transport.token:
            self._nonces[member] = os.urandom(16).hex()
            member.send({"do": "challenge", "nonce": self._nonces[member]})
        self._coming.append(member)

    def take(self, member: Member, event: Message) -> bool:
        """An event that is not of an attempt; False for all others."""
        kind = event["event"]
        if kind == "hello":
            self._greet(member, event)
        elif kind == "ready":
            member.state, member.nproc, member.retrying = State.READY, event["nproc"], False
        elif kind == "refused":
            self.lose(member, event["message"])
        elif kind == "beat":
            member.set_clock(event["at"], event["here"])
        elif kind != "gone":
            return False
        return True

    def _greet(self, member: Member, event: Message) -> None:
        if member in self._coming:
            self._coming.remove(member)
            known = self._identify(member, event)
            if known is None:
                member.detach()
                return
            known.inbound, known.writer, known.decoder = member.inbound, member.writer, member.decoder
            known.address, known.heard = member.address, time.monotonic()
            member = known
        elif event["address"]:
            member.address = event["address"]
        if not member.remote or self._job.transport == "none":
            member.name = event["host"]
        if event["version"] != __version__:
            self.lose(member, f"zeroengine is {event['version']} there and {__version__} here; install the same on all hosts")
            return
        member.state = State.GREETED
        own = self._job.transport == "none" and member.remote  # it has the plan from its own command line
        member.send({
            "do": "prepare", "mark": self._marks(member)[-1], "former": self._marks(member)[:-1],
            "timeout": self._job.node_timeout if member.remote else 0.0,
            "plan": None if own else dataclasses.asdict(self._job.plan), "slots": member.host.slots, "chosen": member.host.chosen,
            "cwd": os.getcwd(), "remote": member.remote, "env": self._job.env if member.remote and not own else {},
            "proof": proof(self._transport.token, event["nonce"], "launcher"),
        })  # fmt: skip

    def _marks(self, member: Member) -> list[str]:
        """Of the host's processes, for each time that it was started. What is left of one time must not be taken for the next."""
        return [f"{self._id}.{member.index}-{time}" for time in range(member.times + 1)]

    def _identify(self, coming: Member, event: Message) -> Member | None:
        """Which host has dialled; None for one that is not of this job."""
        nonce = self._nonces.pop(coming, None)
        if nonce is not None and not hmac.compare_digest(event["proof"] or "", proof(self._transport.token, nonce, "node")):
            return None
        name = event["name"]
        if self._job.transport != "none":
            found = [m for m in self.members if m.state is State.WAITING and m.inbound is None and name in (m.host.name, m.host.target)]
            return found[0] if found else None
        free = [m for m in self.members if m.state is State.LOST]
        index = int(name) if name.isdigit() else free[0].index if free else len(self.members)
        while len(self.members) <= index and index < self._job.max_nodes:
            self.members.append(Member(len(self.members), Host(f"node {len(self.members)}"), True))
        if index == 0 or index >= len(self.members) or self.members[index].inbound is not None:
            coming.send({"do": "say", "text": f"error: node {index} of {self._job.max_nodes} is there already, or is one too many"})
            return None
        if self.members[index].state is State.LOST:
            self.members[index].again()
        return self.members[index]

    # Who is lost.

    def lose(self, member: Member, why: str) -> None:
        if member.there:
            self._lost.append(member)
        member.lose(why)

    def newly_lost(self) -> list[Member]:
        lost, self._lost = self._lost, []
        return lost

    def ended(self, member: Member, why: str) -> None:
        """The link of a member is at its end."""
        if member in self._coming:
            self._coming.remove(member)
            member.detach()
        elif self._ending:
            member.state = State.GONE
            member.detach()
        elif member.state is State.WAITING:
            member.detach()
            self.lose(member, member.last_words() or "its connection ended before it answered")
        else:
            self.lose(member, why)

    def excuse(self) -> None:
        """Nobody is to blame for silence until now."""
        for member in self.members:
            member.heard = time.monotonic()

    def beat(self, now: float) -> None:
        """Shows the hosts that the launcher is there, and looks for those that are not."""
        for member in self.members:
            if member.writer is not None:
                member.writer.flush()
            if member.state is State.READY and member.remote and now > member.heard + self._job.node_timeout:
                self.lose(member, f"nothing was heard of it for {self._job.node_timeout:g} s (cut off, switched off, or it hangs)")
        if now >= self._beat_at:
            self._beat_at = now + min(1.0, self._job.node_timeout / 4)
            for member in self.members:
                if member.state in (State.GREETED, State.READY):
                    member.send({"do": "beat", "at": time.monotonic()})
        if self._job.elastic and not self._ending and now >= self._retry_at:
            self._retry_at = now + _RETRY
            if self.chosen:
                self._call_back([m for m in self.members if m.state is State.LOST and now > m.since + _RETRY / 2])

    def _call_back(self, lost: Sequence[Member]) -> None:
        """Tries to get hosts back that were lost; where they dial, they come by themselves."""
        if self._job.transport == "none" or isinstance(self._transport, OneCommand):
            return
        for member in lost:
            member.again()
            member.retrying = True
        self._transport.start(lost)

    def regroup(self) -> None:
        """Before the next attempt. A job of a fixed size needs its lost hosts back."""
        self.chosen, self._began = [], time.monotonic()
        if not self._job.elastic:
            lost = [m for m in self.members if m.state is State.LOST]
            if isinstance(self._transport, OneCommand):
                self.hopeless += [f"host {m.name} cannot be started again by --launcher {self._job.transport}" for m in lost]
            self._call_back(lost)

    # Who makes the next attempt.

    def gather(self) -> bool:
        """True when the next attempt can begin, with `chosen`. Fills `hopeless` where that cannot be any more."""
        now = time.monotonic()
        self._give_up(now)
        ready = [m for m in self.members if m.state is State.READY]
        coming = [m for m in self.members if m.state in (State.WAITING, State.GREETED) and not (self._job.elastic and m.retrying)]
        absent = self._job.max_nodes - len(ready) - len(coming) if self._job.transport == "none" else 0
        in_time = now < self._began + self._job.connect_timeout
        if self.hopeless or (len(coming) + (absent if in_time else 0) and not self._enough(ready, now)):
            return False
        if len(ready) < self._job.min_nodes:
            lost = [f"host {m.name} could not be started: {m.why}" for m in self.members if m.state is State.LOST]
            lost = lost if self._job.transport != "none" or any(not m.remote for m in self.members if m.state is State.LOST) else []
            missing = f"{len(ready)} of {self._job.min_nodes} nodes have come within {self._job.connect_timeout:g} s"
            self.hopeless = lost or [f"{missing}; start the same command on the others, with this --master-addr and --master-port"]
            return False
        try:
            self.chosen = self.admissible(ready)
            self.address = meeting_address(self._job, self.chosen[0], self.chosen[1:])
        except ZeroEngineError as error:
            self.hopeless = [str(error)]
        return not self.hopeless

    def _give_up(self, now: float) -> None:
        process = self._transport.process
        over = process is not None and process.poll() is not None
        for member in self.members:
            if member.state is State.WAITING and over:
                self.lose(member, self._last_words() or "the command that starts the hosts has ended")
            elif member.state in (State.WAITING, State.GREETED) and now > member.since + self._job.connect_timeout:
                words = member.last_words() or self._last_words()
                self.lose(member, f"it did not answer within {self._job.connect_timeout:g} s" + (f" ({words})" if words else ""))

    def _last_words(self) -> str:
        """The end of what the command that serves all hosts wrote; a node's own words say more than what came of them."""
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines() if line.strip(" -*\t")]
        return "; ".join([line for line in lines if "zerorun: error: " in line][-3:] or lines[-3:])

    def _enough(self, ready: Sequence[Member], now: float) -> bool:
        """An elastic job does not wait for all."""
        if not self._job.elastic or len(ready) < self._job.min_nodes:
            self._enough_since = 0.0
            return False
        self._enough_since = self._enough_since or now
        return now > self._enough_since + _JOIN or len(ready) >= self._job.max_nodes

    def admissible(self, ready: Sequence[Member]) -> list[Member]:
        """The first hosts of `ready`, as many as fit, whose ranks the batch can be kept with."""
        hosts = list(ready[: self._job.max_nodes])
        ranks = sum(m.nproc for m in hosts)
        if self._job.sizes is None:
            return hosts
        while len(hosts) >= self._job.min_nodes:
            if sum(m.nproc for m in hosts) in self._job.sizes:
                return hosts
            hosts.pop()
        raise ZeroEngineError(
            f"`elasticity` keeps the batch with {', '.join(map(str, self._job.sizes))} ranks, and no choice of the first hosts has "
            f"so many (all together have {ranks}); change its micro_batch_sizes or the number of slots"
        )

    def can_grow(self, members: Sequence[Member]) -> bool:
        """True if the hosts that are there now would make a larger attempt than `members`."""
        ready = [m for m in self.members if m.state is State.READY]
        try:
            return len(ready) > len(members) and len(self.admissible(ready)) > len(members)
        except ZeroEngineError:
            return False

    # The end.

    def tell_all(self, message: Message) -> None:
        for member in self.members:
            if member.writer is not None and member.state in (State.GREETED, State.READY):
                member.writer.put(pack(message))

    def end(self, code: int, number: int) -> None:
        self._ending = True
        for member in self.members:
            if member.state is State.WAITING:
                member.lose("the job ended before it answered")
        self.tell_all({"do": "end", "code": code, "number": number})

    def all_gone(self) -> bool:
        return not any(member.there for member in self.members)

    def close(self) -> None:
        """Ends the links and what carries them. What a lost node of this host has left is ended too."""
        for member in (*self.members, *self._coming):
            member.detach()
            if not member.remote:
                for mark in self._marks(member):
                    processes.end_all(mark, (), 1.0)
        self._transport.close()
