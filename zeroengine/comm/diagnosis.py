"""Why an operation does not end, from the heartbeats of all ranks. Pure: it reads views, touches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zeroengine.comm.fingerprint import name_ranks
from zeroengine.comm.status import PeerView, Wait

Cause = Literal["dead", "divergence", "slow", "progress"]


@dataclass(frozen=True)
class Verdict:
    """`dead`: a rank ended, stopped or failed. `divergence`: ranks wait for each other in different operations. `slow`:
    a rank is alive in user code. `progress`: every rank takes part, or nothing is known against one."""

    cause: Cause
    text: str = ""
    ranks: tuple[int, ...] = ()
    # of a divergence: which ranks wait where, and their heartbeats; the same again with later heartbeats confirms it
    waits: tuple[tuple[int, str, int], ...] = ()
    beats: tuple[int, ...] = ()
    # of `dead`: the ranks ended because they had found a divergence, which is then the cause here as well
    diverged: bool = False
    # of `dead`: a rank that is named has not said how it ended, as far as was read
    unsaid: bool = False

    def confirms(self, earlier: Verdict | None) -> bool:
        return (
            earlier is not None
            and self.waits == earlier.waits
            and all(now > then for now, then in zip(self.beats, earlier.beats, strict=True))
        )


@dataclass
class Diagnosis:
    """Follows who waits for whom from this rank's `wait`.

    Every wait needs *all* its ranks, so any circle of waits is a deadlock; a chain that ends at a rank in user code is
    only slow. `issued` counts this rank's operations; `stale` is the silence in seconds that counts as death where the
    process itself cannot be looked at.
    """

    me: int
    wait: Wait
    issued: dict[str, int]
    peer: Callable[[int], PeerView]
    machine: str
    stale: float
    dead: list[PeerView] = field(default_factory=list)
    slow: list[PeerView] = field(default_factory=list)
    circle: list[PeerView] = field(default_factory=list)

    def verdict(self) -> Verdict:
        late = self._late(self.wait)
        self.dead = [v for v in map(self.peer, self.wait.ranks) if v.rank != self.me and self._ended(v)]
        if not self.dead:
            self._follow(late)
        if self.dead:
            return self._dead()
        if self.circle:
            return self._divergence()
        if self.slow:
            text = "; ".join(f"{p.who()} {p.activity()}" for p in self.slow[:4])
            return Verdict("slow", text, tuple(p.rank for p in self.slow))
        return Verdict("progress")

    def _late(self, wait: Wait) -> list[int]:
        """Ranks that have not issued their part of `wait`."""
        return [r for r in wait.ranks if self._issued(r, wait.lane) <= wait.index]

    def _issued(self, rank: int, lane: str) -> int:
        if rank == self.me:
            return self.issued.get(lane, 0)
        status = self.peer(rank).status
        return status.issued.get(lane, 0) if status else 0

    def _follow(self, late: Sequence[int]) -> None:
        """Visits the ranks that hold us up, those that hold them up, and so on, each once."""
        todo: list[tuple[int, tuple[int, ...]]] = [(rank, ()) for rank in late]
        seen = {self.me}
        while todo:
            rank, path = todo.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            view = self.peer(rank)
            if self._ended(view):
                self.dead.append(view)
                continue
            needs = self._needs(view)
            if needs is None:
                self.slow.append(view)
                continue
            path = (*path, rank)
            if self.me in needs and not self.circle:
                self.circle = [self.peer(r) for r in path]
            todo.extend((r, path) for r in needs)

    def _needs(self, view: PeerView) -> list[int] | None:
        """Ranks that hold `view` up; None when nothing is known to (it is in user code)."""
        status = view.status
        if status is None:
            return None
        if status.wait is not None:
            return self._late(status.wait)
        if status.call is not None and status.call_ranks is not None:
            return [r for r in status.call_ranks if r != view.rank and not self._in_call(r, status.call)]
        return None

    def _in_call(self, rank: int, call: str) -> bool:
        status = None if rank == self.me else self.peer(rank).status
        return status is not None and status.call == call

    def _ended(self, view: PeerView) -> bool:
        status = view.status
        if status is not None and (status.state != "running" or self.wait.lane in status.poisoned):
            return True
        process = view.process(self.machine)
        if process == "gone" or (process == "stopped" and view.silent > self.stale / 2):  # a profiler stops it for a moment
            return True
        return process == "unknown" and view.silent > self.stale

    def _dead(self) -> Verdict:
        """Names the first causes: reports of other ranks' failures come last, and only if there is nothing better."""
        first = [p for p in self.dead if not (p.status and p.status.secondary)] or self.dead
        text = "; ".join(self.how_it_ended(p) for p in first[:4])
        if len(first) > 4:
            text += f"; and {name_ranks([p.rank for p in first[4:]])}"
        diverged = all(p.status is not None and p.status.diverged for p in first)
        unsaid = any(p.status is None or p.status.state == "running" for p in first)
        return Verdict("dead", text, tuple(p.rank for p in first), diverged=diverged, unsaid=unsaid)

    def how_it_ended(self, view: PeerView) -> str:
        status, process = view.status, view.process(self.machine)
        if status is not None and status.state == "failed":
            return f"{view.who()} failed: {status.error}"
        if status is not None and status.state == "exited":
            return f"{view.who()} has exited"
        if process == "gone":
            return f"{view.who()} is gone without a word (killed, crashed or os._exit), {self._last_seen(view)}"
        if process == "stopped":
            return f"{view.who()} is stopped (SIGSTOP or a debugger), {self._last_seen(view)}"
        if status is not None and self.wait.lane in status.poisoned:
            return f"{view.who()} left {self.wait.lane!r} after an error: {status.poisoned[self.wait.lane]}"
        return f"{view.who()} is silent since {view.silent:.0f} s (dead, stopped or cut off), {self._last_seen(view)}"

    def _last_seen(self, view: PeerView) -> str:
        if view.status is None:
            return "before its first heartbeat"
        return f"when last seen it {view.activity().replace('waits', 'waited').replace('is in', 'was in')}"

    def _divergence(self) -> Verdict:
        views = self.circle
        text = "; ".join(f"{p.who()} {p.activity()}" for p in views[:4])
        waits, beats = [], []
        for p in views:
            if p.status is None:
                continue
            wait = p.status.wait
            waits.append((p.rank, wait.lane if wait else str(p.status.call), wait.index if wait else 0))
            beats.append(p.status.beat)
        return Verdict("divergence", text, tuple(p.rank for p in views), tuple(waits), tuple(beats))
