"""What a rank tells the others about itself about once a second, and how they see it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from zeroengine.comm.whereabouts import process_is_stopped, process_start


@dataclass(frozen=True)
class Wait:
    """An operation that holds a rank up: number `index` of stream `lane`, which needs the same number from `ranks`."""

    lane: str
    index: int
    what: str
    ranks: list[int]
    seconds: float = 0.0


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
    wait: Wait | None = None
    line: str = ""
    call: str | None = None
    call_ranks: list[int] | None = None

    def pack(self) -> str:
        data = asdict(self)
        if self.wait is not None:
            data["wait"]["ranks"] = pack_ranks(self.wait.ranks)
        if self.call_ranks is not None:
            data["call_ranks"] = pack_ranks(self.call_ranks)
        return json.dumps(data)

    @staticmethod
    def unpack(text: str | bytes) -> Status:
        data = json.loads(text)
        if data["wait"] is not None:
            data["wait"] = Wait(**{**data["wait"], "ranks": unpack_ranks(data["wait"]["ranks"])})
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

    def activity(self) -> str:
        """What it was doing at its last heartbeat."""
        s = self.status
        if s is None:
            return "gave no sign of life yet"
        if s.wait is not None:
            return f"waits for {s.wait.what} since {s.wait.seconds:.0f} s, called at {s.line}"
        if s.call is not None:
            return f"is inside torch.distributed.{s.call}, called at {s.line}"
        return f"is in user code at {s.line}"


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
