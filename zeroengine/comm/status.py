"""What a rank tells the others about itself about once a second, and how they see it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from zeroengine.comm.whereabouts import MAIN, process_is_stopped, process_start

TORCH_CALL = ""  # in place of a stream: a call of torch.distributed by the main thread


@dataclass(frozen=True)
class Wait:
    """An operation that holds a thread of a rank up: number `index` of stream `lane`, which needs the same number from `ranks`."""

    lane: str
    index: int
    what: str
    ranks: list[int]
    seconds: float = 0.0
    thread: int = MAIN


@dataclass(frozen=True)
class Worker:
    """A thread beside the main one that uses streams, and those that it has made or on which it was the last to issue."""

    ident: int
    line: str
    lanes: list[str]


@dataclass(frozen=True)
class Status:
    """One heartbeat of one rank."""

    beat: int
    pid: int
    host: str
    machine: str
    started: str | None
    state: str = "running"  # running, exited, failed
    error: str = ""
    secondary: bool = False  # the failure is itself the report of another rank's
    diverged: bool = False  # and what it reports is a divergence
    issued: dict[str, int] = field(default_factory=dict)  # operations issued, by stream
    poisoned: dict[str, str] = field(default_factory=dict)  # streams that ended in an error, and the error
    waits: list[Wait] = field(default_factory=list)  # one a thread, the oldest first
    workers: list[Worker] = field(default_factory=list)
    line: str = ""  # of the main thread, and the call of torch that it is in
    call: str | None = None
    call_ranks: list[int] | None = None

    def thread_of(self, lane: str) -> int:
        """The thread that will issue the next operation of `lane`: the one that issued the last, or made the lane. Of a lane that has
        yet to be made, the main thread, unless all others are of one other."""
        for worker in self.workers:
            if lane in worker.lanes:
                return worker.ident
        theirs = sum(len(worker.lanes) for worker in self.workers)
        if lane == TORCH_CALL or lane in self.issued or len(self.workers) != 1 or theirs < len(self.issued):
            return MAIN
        return self.workers[0].ident

    def wait_of(self, thread: int) -> Wait | None:
        return next((wait for wait in self.waits if wait.thread == thread), None)

    def line_of(self, thread: int) -> str:
        return next((worker.line for worker in self.workers if worker.ident == thread), self.line)

    def pack(self) -> str:
        data = asdict(self)
        for packed, wait in zip(data["waits"], self.waits, strict=True):
            packed["ranks"] = pack_ranks(wait.ranks)
        if self.call_ranks is not None:
            data["call_ranks"] = pack_ranks(self.call_ranks)
        return json.dumps(data)

    @staticmethod
    def unpack(text: str | bytes) -> Status:
        data = json.loads(text)
        data["waits"] = [Wait(**{**wait, "ranks": unpack_ranks(wait["ranks"])}) for wait in data["waits"]]
        data["workers"] = [Worker(**worker) for worker in data["workers"]]
        if data["call_ranks"] is not None:
            data["call_ranks"] = unpack_ranks(data["call_ranks"])
        return Status(**data)


@dataclass(frozen=True)
class PeerView:
    """A peer as this rank sees it: its last heartbeat (None: none was ever read) and the seconds since that changed."""

    rank: int
    status: Status | None
    silent: float

    def who(self) -> str:
        s = self.status
        return f"rank {self.rank} (host {s.host}, pid {s.pid})" if s else f"rank {self.rank}"

    def process(self, machine: str) -> str:
        """'gone', 'stopped' or 'alive' for a process of this machine; 'unknown' for one elsewhere."""
        s = self.status
        if s is None or not machine or s.machine != machine:
            return "unknown"
        if process_start(s.pid) != s.started:
            return "gone"
        return "stopped" if process_is_stopped(s.pid) else "alive"

    def activity(self, thread: int | None = None) -> str:
        """What it was doing at its last heartbeat: the given thread, or else the one that waits longest, or the main one."""
        s = self.status
        if s is None:
            return "gave no sign of life yet"
        if thread is None:
            thread = s.waits[0].thread if s.waits else MAIN
        wait = s.wait_of(thread)
        if wait is not None:
            return f"waits for {wait.what} since {wait.seconds:.0f} s, called at {s.line_of(thread)}"
        if thread == MAIN and s.call is not None:
            return f"is inside torch.distributed.{s.call}, called at {s.line}"
        return f"is in user code at {s.line_of(thread)}"


def pack_ranks(ranks: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """Ranks of a mesh dimension are an arithmetic progression: three numbers, however many ranks."""
    if len(ranks) > 3:
        step = ranks[1] - ranks[0]
        if step and list(ranks) == list(range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step)):
            return {"range": [ranks[0], ranks[-1], step]}
    return list(ranks)


def unpack_ranks(packed: list[int] | dict[str, list[int]]) -> list[int]:
    if isinstance(packed, dict):
        first, last, step = packed["range"]
        return list(range(first, last + (1 if step > 0 else -1), step))
    return packed
