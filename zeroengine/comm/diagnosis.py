"""Why an operation does not end, from the heartbeats of all ranks. Pure: it reads views, touches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from zeroengine.comm.fingerprint import name_ranks
from zeroengine.comm.status import TORCH_CALL, PeerView, Status, Wait
from zeroengine.comm.whereabouts import MAIN

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


class _Held(NamedTuple):
    """A thread of a rank that has yet to issue what others wait for."""

    view: PeerView
    thread: int

    def text(self) -> str:
        return f"{self.view.who()} {self.view.activity(self.thread)}"


@dataclass
class Diagnosis:
    """Follows who waits for whom from `wait` of a thread of this rank.

    Every wait needs *all* its ranks, so any circle of waits is a deadlock; a chain that ends at a thread in user code is
    only slow. `own`: the state of this rank; `stale` is the silence in seconds that counts as death where the process itself
    cannot be looked at.
    """

    me: int
    wait: Wait
    own: Status
    peer: Callable[[int], PeerView]
    machine: str
    stale: float
    dead: list[PeerView] = field(default_factory=list)
    slow: list[_Held] = field(default_factory=list)
    circle: list[_Held] = field(default_factory=list)

    def verdict(self) -> Verdict:
        late = self._late(self.wait)
        self.dead = [view for view in (self.peer(r) for r in self.wait.ranks if r != self.me) if self._ended(view)]
        if not self.dead:
            self._follow(late)
        if self.dead:
            return self._dead()
        if self.circle:
            return self._divergence()
        if self.slow:
            text = "; ".join(held.text() for held in self.slow[:4])
            return Verdict("slow", text, tuple(held.view.rank for held in self.slow))
        return Verdict("progress")

    def _late(self, wait: Wait) -> list[int]:
        """Ranks that have not issued their part of `wait`."""
        return [r for r in wait.ranks if self._issued(r, wait.lane) <= wait.index]

    def _view(self, rank: int) -> PeerView:
        return PeerView(rank, self.own, 0.0) if rank == self.me else self.peer(rank)

    def _issued(self, rank: int, lane: str) -> int:
        status = self._view(rank).status
        return status.issued.get(lane, 0) if status else 0

    def _follow(self, late: Sequence[int]) -> None:
        """Visits the threads that hold us up, those that hold them up, and so on, each once."""
        todo: list[tuple[int, str, tuple[_Held, ...]]] = [(rank, self.wait.lane, ()) for rank in late]
        seen: set[tuple[int, int]] = set()
        while todo:
            rank, lane, path = todo.pop(0)
            view = self._view(rank)
            thread = view.status.thread_of(lane) if view.status else MAIN
            if (rank, thread) == (self.me, self.wait.thread):
                self.circle = self.circle or list(path)
                continue
            if (rank, thread) in seen:
                continue
            seen.add((rank, thread))
            if rank != self.me and self._ended(view):
                self.dead.append(view)
                continue
            held = _Held(view, thread)
            needs = self._needs(held)
            if needs is None:
                self.slow.append(held)
                continue
            todo.extend((r, of, (*path, held)) for r, of in needs)

    def _needs(self, held: _Held) -> list[tuple[int, str]] | None:
        """Ranks that hold `held` up, and their streams; None when nothing is known to (it is in user code)."""
        status = held.view.status
        if status is None:
            return None
        wait = status.wait_of(held.thread)
        if wait is not None:
            return [(rank, wait.lane) for rank in self._late(wait)]
        if held.thread == MAIN and status.call is not None and status.call_ranks is not None:
            return [(r, TORCH_CALL) for r in status.call_ranks if r != held.view.rank and not self._in_call(r, status.call)]
        return None

    def _in_call(self, rank: int, call: str) -> bool:
        status = self.peer(rank).status if rank != self.me else None
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
        text = "; ".join(held.text() for held in self.circle[:4])
        waits, beats = [], []
        for view, thread in self.circle:
            if view.status is None:
                continue
            wait = view.status.wait_of(thread)
            waits.append((view.rank, wait.lane if wait else str(view.status.call), wait.index if wait else 0))
            beats.append(view.status.beat)
        return Verdict("divergence", text, tuple(view.rank for view, _ in self.circle), tuple(waits), tuple(beats))
