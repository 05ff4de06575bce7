"""Health of the peers: a heartbeat of every process, and the watch that turns silence into a named error.

One `Monitor` a process. A daemon thread writes this rank's `Status` to the store of the default process group about
once a second and, while someone waits for other ranks, reads theirs. Only that thread touches the store: a store whose
host is stopped blocks for ever, so no waiter may.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zeroengine.comm.lane import Lane
from zeroengine.comm.leaving import leave_at_once
from zeroengine.comm.status import PeerView, Status, Wait, Worker
from zeroengine.comm.torch_calls import CallWatch, user_group_counts
from zeroengine.comm.whereabouts import machine_id, main_thread_place, process_start, python_threads, thread_place
from zeroengine.errors import DivergenceError, RankError
from zeroengine.logging import logger

_GOODBYE_SECONDS = 1.0
_LINGER_SECONDS = 2.0
_SETTLE_SECONDS = 0.2
_ANSWER_SECONDS = 8.0  # of a store that ranks have already met in
_CONNECT_SECONDS = 2.0  # at first; torch tries up to twice as long where nobody listens
_STORE_SECONDS = 2.0  # the bound of an operation on the store, which a thread cannot be called back from
_ERROR_CHARACTERS = 600
_ENDED = "zeroengine/health/ended"


class Monitor:
    """Heartbeat of this rank, and what is known of the others.

    `store` is used by this object alone (give it a clone: a blocked call holds the connection). `interval` is the time
    between heartbeats in seconds.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, store_host: int | None, interval: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store_host = store_host
        self.interval = interval
        self.machine = machine_id()
        self._store = store
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._lanes_lock = threading.Lock()  # a set may not grow while another thread reads it
        self._waits: dict[int, Wait] = {}  # by thread
        self._views: dict[int, tuple[Status, float]] = {}  # last status, and when it was first seen
        self._known_since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._sent = threading.Event()
        self._end: tuple[str, str, bool] | None = None  # state, error, secondary
        self.failure: RankError | None = None  # what this rank has told first
        self._lost: Sequence[int] = ()  # ranks that it names
        self._diverged = False  # that error is a divergence that this rank found
        self._answered = time.monotonic()  # when the store last answered
        self._reads = 0  # completed looks at the store
        self._store_closed = False
        self.hooked = False  # the process tells it of its end: see `install_hooks`
        pid = os.getpid()
        self._base = Status(0, pid, socket.gethostname(), self.machine, process_start(pid))
        self._calls = CallWatch()
        self._beat = 0
        self._last = self._base  # what was told last
        self._write()
        self._thread = threading.Thread(target=self._run, name="zeroengine health", daemon=True)
        self._thread.start()

    # -- what this rank is doing ------------------------------------------------------------------------------------

    def add_lane(self, lane: Lane) -> None:
        with self._lanes_lock:
            self._lanes.add(lane)
        self._wake.set()

    def remove_lane(self, lane: Lane) -> None:
        """A closed stream is no evidence about a later one of the same name."""
        with self._lanes_lock:
            self._lanes.discard(lane)

    def beat_each(self, interval: float) -> None:
        """So often at least, in seconds."""
        if interval < self.interval:
            self.interval = interval
            self._wake.set()

    def own(self) -> Status:
        """What this rank does now."""
        return self._threads(self._last)

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Publishes `wait` as what holds this rank up, and has the heartbeats of its ranks read meanwhile, as long as anybody waits."""
        ident, start = threading.get_ident(), time.monotonic()
        with self._lock:
            self._waits[ident] = replace(wait, seconds=start)  # seconds: the start, until it is published
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(ident, None)
                if not self._waits:
                    self._known_since.clear()

    def record_end(self, state: str, error: str = "", secondary: bool = False) -> None:
        """Publishes the end of this process; returns after a second at most, sent or not.

        The rank that keeps the store stays for up to two more while others have not ended: they may be about to read
        why somebody failed.
        """
        if not self._thread.is_alive():
            return  # the end has been told
        if self._end is None or self._end[0] != "failed":
            self._end = (state, error[-_ERROR_CHARACTERS:], secondary)
            self._sent.clear()
            self._wake.set()
        keeper = self.rank == self.store_host
        self._sent.wait(_GOODBYE_SECONDS + (_LINGER_SECONDS if keeper else 0.0))

    def leave(self) -> None:
        """The default process group ends before its process does. To be called anywhere, as in a garbage collection: the thread sees
        it by itself."""
        self._end = self._end or ("exited", "", False)

    def note_failure(self, error: RankError, lost: Sequence[int] = ()) -> None:
        """This process is about to raise what it found out about ranks that it has `lost`. Told at once, so that ranks which find
        *this* one gone look further; `record_end` will say the same, if it is reached."""
        if self._end is None:
            self.failure, self._lost = error, lost
            self._diverged = isinstance(error, DivergenceError)
            self._end = ("failed", str(error)[-_ERROR_CHARACTERS:], True)
            self._sent.clear()
            self._wake.set()
            self._sent.wait(_GOODBYE_SECONDS)  # the caller may end the process as soon as it has the error

    def busy(self) -> bool:
        """Whether a thread of this process is inside a collective."""
        return any(lane.busy() for lane in self._known_lanes())

    def _known_lanes(self) -> list[Lane]:
        with self._lanes_lock:
            return list(self._lanes)

    def settle(self) -> None:
        """Waits a moment for threads inside a collective before the interpreter goes (see `leaving`). The lowest
        ranks go first: their closed connections end the collectives of the others while those still wait."""
        deadline = time.monotonic() + _SETTLE_SECONDS * (1 + self.rank % 8)
        while self.busy() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._thread.join(_STORE_SECONDS)  # a store that is slow to answer holds it in native code

    # -- what is known of others ------------------------------------------------------------------------------------

    def view(self, rank: int) -> PeerView:
        now = time.monotonic()
        with self._lock:
            if rank not in self._known_since:
                self._known_since[rank] = now
                self._wake.set()
            known = self._views.get(rank)
            since = max(self._known_since[rank], known[1] if known else 0.0)
        return PeerView(rank, known[0] if known else None, now - since)

    def read_again(self, bound: float) -> None:
        """Returns when heartbeats have been read by a look at the store that began after this call, `bound` seconds at most."""
        deadline = time.monotonic() + bound
        wanted = self._reads + 2  # one may be under way
        while self._reads < wanted and self._end is None and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.005)

    def restart_clocks(self) -> None:
        """Forgets how long others were silent: this process itself was stopped, and everyone may have been."""
        now = time.monotonic()
        with self._lock:
            self._known_since = dict.fromkeys(self._known_since, now)
            self._answered = now

    def store_silent(self) -> float:
        """Seconds since the store last answered, beyond the usual interval; infinite when its connection is closed."""
        return float("inf") if self._store_closed else max(0.0, time.monotonic() - self._answered - 2 * self.interval)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._end is None:
            self._wake.wait(self.interval)
            self._wake.clear()
            try:
                self._write()
                self._read()
                self._reads += 1
                self._answered = time.monotonic()
            except dist.DistNetworkError as error:
                self._store_closed = True
                logger.debug("the store is gone: %s", error)
            except Exception as error:  # a store that fails is evidence about its host, not an error of ours
                logger.debug("the store does not answer: %s", error)
        try:
            self._write()
            self._linger(self._store.add(_ENDED, 1))
        except Exception as error:
            logger.debug("the end of this rank could not be published: %s", error)
        self._sent.set()

    def _linger(self, ended: int) -> None:
        deadline = time.monotonic() + _LINGER_SECONDS
        silent = sum(r not in self._views or self._views[r][0].state == "running" for r in self._lost)  # will not come to read
        while self.rank == self.store_host and ended + silent < self.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            ended = self._store.add(_ENDED, 0)

    def _write(self) -> None:
        self._beat += 1
        self._last = self._status()
        self._store.set(_key(self.rank), self._last.pack())

    def _status(self) -> Status:
        place = main_thread_place()
        call_ranks = self._calls.ranks(place.line, place.call, user_group_counts())
        lanes = self._known_lanes()
        for lane in lanes:
            lane.retire()  # what nobody waits for
        state, error, secondary = self._end or ("running", "", False)
        status = replace(
            self._base,
            beat=self._beat,
            state=state,
            error=error,
            secondary=secondary,
            diverged=self._diverged,
            poisoned={lane.key: str(lane.error)[:_ERROR_CHARACTERS] for lane in lanes if lane.error is not None},
            line=place.line,
            call=place.call,
            call_ranks=list(call_ranks) if call_ranks is not None else None,
        )
        return self._threads(status)

    def _threads(self, status: Status) -> Status:
        """`status` with what the threads have issued and wait for."""
        lanes, others, now = self._known_lanes(), python_threads(), time.monotonic()
        with self._lock:
            waits = sorted(self._waits.values(), key=lambda wait: wait.seconds)
        waits = [replace(wait, seconds=now - wait.seconds) for wait in waits]
        issuers: dict[int, list[str]] = {wait.thread: [] for wait in waits}
        for lane in lanes:
            issuers.setdefault(lane.issuer, []).append(lane.key)
        workers = [Worker(ident, thread_place(ident).line, keys) for ident, keys in issuers.items() if ident in others]
        return replace(status, issued={lane.key: lane.issued for lane in lanes}, waits=waits, workers=workers)

    def _read(self) -> None:
        with self._lock:
            ranks = [r for r in self._known_since if r != self.rank]
        if self.store_host is not None and self.store_host != self.rank and self.store_host not in self._views:
            ranks.append(self.store_host)  # known in time: when its host dies the store can no longer tell
        ranks = [r for r in dict.fromkeys(ranks) if self._present(r)]
        if not ranks:
            self._store.check([_key(self.rank)])  # it answers: that is worth knowing
            return
        now = time.monotonic()
        for rank, text in zip(ranks, self._store.multi_get([_key(r) for r in ranks]), strict=True):
            status = Status.unpack(text)
            with self._lock:
                known = self._views.get(rank)
                if known is None or known[0].beat != status.beat:
                    self._views[rank] = (status, now)

    def _present(self, rank: int) -> bool:
        return rank in self._views or self._store.check([_key(rank)])


def _key(rank: int) -> str:
    return f"zeroengine/health/{rank}"


@dataclass(frozen=True)
class _Kept:
    group: weakref.ref[Any]
    monitor: Monitor
    store: dist.Store  # ranks that are still in the group learn from it that this one has left, also where it is kept here


# A process has one main thread, one sys.excepthook and one default process group, hence one monitor.
_kept: list[_Kept] = []


def process_monitor(interval: float = 1.0) -> Monitor:
    """The monitor of this process for the default process group, started on first use."""
    group = dist.group.WORLD
    for known in _kept:
        if known.group() is group:
            known.monitor.beat_each(interval)
            return known.monitor
    store = dist.distributed_c10d._get_default_store()
    monitor = start_monitor(group, store, dist.get_rank(), dist.get_world_size(), interval)
    install_hooks(monitor)
    return monitor


def start_monitor(group: object, store: dist.Store, rank: int, world_size: int, interval: float) -> Monitor:
    """The monitor of this process for what is or becomes the default process group, whose store is `store`. It ends with the group."""
    own = _connected_again(store, rank)
    own.set_timeout(timedelta(seconds=max(_STORE_SECONDS, 3 * interval)))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    monitor = Monitor(own, rank, world_size, None if agent else 0, interval)
    for known in _kept:
        known.monitor.leave()  # of a group that somebody still holds
    _kept[:] = [_Kept(weakref.ref(group, lambda _: monitor.leave()), monitor, store)]
    return monitor


def _connected_again(store: dist.Store, rank: int) -> dist.Store:
    """A connection of its own to a store that ranks have already met in. One that is lost is known at once where it is asked; a new
    one is tried for some time. Hence both in turn."""
    patience: timedelta = store.timeout  # type: ignore[attr-defined]
    deadline, bound = time.monotonic() + _ANSWER_SECONDS, _CONNECT_SECONDS
    try:
        while True:
            store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
            store.check([_key(rank)])
            store.set_timeout(timedelta(seconds=bound))
            try:
                own: dist.Store = store.clone()  # type: ignore[attr-defined]
                return own
            except dist.DistError:
                if time.monotonic() > deadline:
                    raise
                bound *= 2  # it answers, slowly
    except dist.DistError as error:
        said = str(error).partition("\n")[0]
        raise RankError(
            f"rank {rank}: the store of the job does not answer any more ({said}); the process that keeps it, rank 0 or the launcher, "
            "has ended or hangs: its output says why"
        ) from error
    finally:
        store.set_timeout(patience)


def install_hooks(monitor: Monitor) -> None:
    """Has the end of this process told to the others, once for each monitor. After `init_process_group`, which puts a hook of its
    own around those that it finds, and would swallow what an error prints."""
    if monitor.hooked:
        return
    monitor.hooked = True
    previous, pid, watched = sys.excepthook, os.getpid(), weakref.ref(monitor)  # the hooks outlive it

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        mine = watched() if os.getpid() == pid else None  # not in a forked child
        if mine is not None:
            text = "".join(traceback.format_exception_only(kind, error)).strip()
            mine.record_end("failed", text, isinstance(error, RankError))
        previous(kind, error, trace)
        if mine is not None and (mine.busy() or isinstance(error, RankError)):
            leave_at_once(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def bye() -> None:
        mine = watched() if os.getpid() == pid else None
        if mine is not None:
            mine.record_end("exited")
            mine.settle()

    sys.excepthook = hook
    atexit.register(bye)
