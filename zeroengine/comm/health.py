"""Health of the peers: a heartbeat of every process, and the watch that turns silence into a named error.

One `Monitor` a process. A daemon thread writes this rank's `Status` to the store of the default process group about once
a second and, while someone waits for other ranks, reads theirs. Only that thread touches the store: a store whose host
is stopped blocks for ever, so no waiter may.
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
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Iterator

import torch.distributed as dist

from zeroengine.comm.lane import Lane
from zeroengine.comm.status import PeerView, Status, Wait
from zeroengine.comm.whereabouts import machine_id, main_thread_place, process_start
from zeroengine.errors import RankError
from zeroengine.logging import logger

_GOODBYE_SECONDS = 1.0
_ERROR_CHARACTERS = 600


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
        self._waits: dict[int, Wait] = {}  # by thread
        self._views: dict[int, tuple[Status, float]] = {}  # last status, and when it was first seen
        self._known_since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._sent = threading.Event()
        self._end: tuple[str, str, bool] | None = None  # state, error, secondary
        self._answered = time.monotonic()  # when the store last answered
        pid = os.getpid()
        self._base = Status(0, pid, socket.gethostname(), self.machine, process_start(pid))
        self._beat = 0
        self._write()
        self._thread = threading.Thread(target=self._run, name="zeroengine health", daemon=True)
        self._thread.start()

    # -- what this rank is doing ------------------------------------------------------------------------------------

    def add_lane(self, lane: Lane) -> None:
        self._lanes.add(lane)

    def issued(self) -> dict[str, int]:
        return {lane.key: lane.issued for lane in list(self._lanes)}

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Publishes `wait` as what holds this rank up, and has the heartbeats of its ranks read meanwhile."""
        ident, start = threading.get_ident(), time.monotonic()
        with self._lock:
            self._waits[ident] = replace(wait, seconds=start)  # seconds: the start, until it is published
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(ident, None)

    def forget(self) -> None:
        """Stops reading heartbeats when nobody waits."""
        with self._lock:
            if not self._waits:
                self._known_since.clear()

    def record_end(self, state: str, error: str = "", secondary: bool = False) -> None:
        """Publishes the end of this process; returns after at most a second, sent or not."""
        if self._end is not None and self._end[0] == "failed":
            return
        self._end = (state, error[-_ERROR_CHARACTERS:], secondary)
        self._sent.clear()
        self._wake.set()
        self._sent.wait(_GOODBYE_SECONDS)

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

    def store_silent(self) -> float:
        """Seconds since the store last answered, beyond the usual interval."""
        return max(0.0, time.monotonic() - self._answered - 2 * self.interval)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait(self.interval)
            self._wake.clear()
            ending = self._end is not None
            try:
                self._write()
                self._read()
                self._answered = time.monotonic()
            except Exception as error:  # a store that fails is evidence, not an error of ours
                logger.debug("the store does not answer: %s", error)
            if ending:
                self._sent.set()
                return

    def _write(self) -> None:
        self._beat += 1
        self._store.set(_key(self.rank), self._status().pack())

    def _status(self) -> Status:
        place = main_thread_place()
        now = time.monotonic()
        with self._lock:
            oldest = min(self._waits.values(), key=lambda w: w.seconds, default=None)
        wait = replace(oldest, seconds=now - oldest.seconds) if oldest else None
        lanes = list(self._lanes)
        state, error, secondary = self._end or ("running", "", False)
        return replace(
            self._base,
            beat=self._beat,
            state=state,
            error=error,
            secondary=secondary,
            issued={lane.key: lane.issued for lane in lanes},
            poisoned={lane.key: str(lane.error)[:_ERROR_CHARACTERS] for lane in lanes if lane.error is not None},
            wait=wait,
            line=place.line,
            call=place.call,
            call_ranks=list(place.call_ranks) if place.call_ranks is not None else None,
        )

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


# A process has one main thread, one sys.excepthook and one default process group, hence one monitor.
_monitors: list[tuple[object, Monitor]] = []


def process_monitor(interval: float = 1.0) -> Monitor:
    """The monitor of this process for the default process group, started on first use."""
    group = dist.group.WORLD
    for owner, monitor in _monitors:
        if owner is group:
            return monitor
    store = dist.distributed_c10d._get_default_store()
    own = store.clone()
    own.set_timeout(timedelta(seconds=max(2.0, 3 * interval)))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    monitor = Monitor(own, dist.get_rank(), dist.get_world_size(), None if agent else 0, interval)
    _monitors[:] = [(group, monitor)]
    _install_hooks(monitor)
    return monitor


def _install_hooks(monitor: Monitor) -> None:
    previous, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:  # not in a forked child
            text = "".join(traceback.format_exception_only(kind, error)).strip()
            monitor.record_end("failed", text, isinstance(error, RankError))
        previous(kind, error, trace)

    sys.excepthook = hook
    atexit.register(lambda: monitor.record_end("exited") if os.getpid() == pid else None)
