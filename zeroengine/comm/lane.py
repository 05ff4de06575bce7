"""An ordered stream of operations: a queue, one worker thread, and handles to wait on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from zeroengine.comm.fingerprint import Fingerprint

_T = TypeVar("_T")


class Watch(Protocol):
    """What waits for other ranks and knows when to give up (see `health`)."""

    def watch(self, lane: Lane) -> None:
        """Makes `lane` known, so that other ranks can learn how far this one has come."""
        ...

    def unwatch(self, lane: Lane) -> None:
        """`lane` was closed in good order: it says nothing about this rank any more."""
        ...

    def until(self, operation: Operation) -> None:
        """Returns when `operation` is done; poisons its lane with a `RankError` when it cannot be any more."""
        ...

    def explain(self, lane: Lane, what: str, error: Exception) -> Exception:
        """The error to raise for a failure of the transport: names the rank that caused it where that can be known."""
        ...


class Operation:
    """`Work` of a lane. Holds its tensors (through the closure it runs) until it is finished."""

    __slots__ = ("lane", "index", "fingerprint", "_run", "_finished", "_error")

    def __init__(self, lane: Lane, index: int, fingerprint: Fingerprint, run: Callable[[], None]) -> None:
        self.lane = lane
        self.index = index
        self.fingerprint = fingerprint
        self._run: Callable[[], None] | None = run
        self._finished = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        if not self._finished.is_set():
            self.lane.watch.until(self)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def error(self) -> Exception | None:
        """What it ended with, if with an error."""
        return self._error

    def finished_within(self, seconds: float) -> bool:
        return self._finished.wait(seconds)

    def finish(self, error: Exception | None = None) -> None:
        self._run = None
        if not self._finished.is_set():
            self._error = error
            self._finished.set()

    def execute(self) -> None:
        run = self._run
        if run is not None:
            run()

    def describe(self) -> str:
        return f"{self.fingerprint.describe()} ({self.lane.key}, operation {self.index})"


class Lane:
    """Operations of one stream, run one after another by a daemon thread.

    `key` names the stream alike on every rank that takes part; `peers` are the other ranks (global) whose operations
    meet ours. An error poisons the lane: every later operation fails with the same error, and `interrupt` asks the
    transport to give up the one that runs.
    """

    def __init__(
        self,
        key: str,
        peers: Sequence[int],
        watch: Watch,
        verify: Callable[[Operation], None] | None,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self.key = key
        self.peers = peers
        self.watch = watch
        self.issued = 0
        self.error: Exception | None = None
        self._pending: dict[int, Operation] = {}
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._verify = verify
        self._interrupt = interrupt
        self._busy = False
        self._thread = threading.Thread(target=self._work, name=f"zeroengine {key}", daemon=True)
        watch.watch(self)
        self._thread.start()

    def submit(self, fingerprint: Fingerprint, run: Callable[[], None]) -> Operation:
        with self._lock:
            if self.error is not None:
                raise self.error.with_traceback(None)
            operation = Operation(self, self.issued, fingerprint, run)
            self._pending[operation.index] = operation
            self.issued += 1
            self._queue.put(operation)
        return operation

    def head(self) -> Operation | None:
        """The oldest unfinished operation: what this rank is really held up by."""
        with self._lock:
            return self._pending[min(self._pending)] if self._pending else None

    def poison(self, error: Exception) -> None:
        with self._lock:
            self.error = self.error or error
            pending, self._pending = self._pending, {}
        for operation in pending.values():
            operation.finish(self.error)
        if self._interrupt is not None:
            self._interrupt()

    def running(self) -> bool:
        return self._thread.is_alive()

    def busy(self) -> bool:
        """Whether the thread is inside an operation, that is in the transport's native code."""
        return self._busy and self._thread.is_alive()

    def close(self, seconds: float) -> None:
        """Ends the thread after what is queued; one that a dead peer holds up is left to the end of the process."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        if not self.running():
            self._verify = self._interrupt = None  # they hold the process group
        if self.error is None:
            self.error = RuntimeError(f"communicator {self.key!r} is closed")
            if not self.busy():  # one that is stuck in the transport still counts when the process ends
                self.watch.unwatch(self)

    def _work(self) -> None:
        with torch.inference_mode():  # results may be written into inference tensors as well as into ordinary ones
            while (operation := self._queue.get()) is not None:
                self._run_one(operation)
                del operation  # an idle lane holds no tensors

    def _run_one(self, operation: Operation) -> None:
        if self.error is not None:
            operation.finish(self.error)
            return
        try:
            self._busy = True
            if self._verify is not None:
                self._verify(operation)
            operation.execute()
        except Exception as error:  # handed to whoever waits
            self._busy = False
            if self.error is not None:  # given up because of an error that is known already
                operation.finish(self.error)
                return
            self.poison(self.watch.explain(self, operation.describe(), error))
            return
        self._busy = False
        with self._lock:
            self._pending.pop(operation.index, None)
        operation.finish()


def create_in_lane(name: str, peers: Sequence[int], watch: Watch, make: Callable[[], _T]) -> _T:
    """What `make` returns, which waits for all `peers` to make group `name` with it: in a lane of its own, so that one that never
    comes is named."""
    made: list[_T] = []
    lane = Lane(f"creation of {name}", peers, watch, None)
    try:
        lane.submit(Fingerprint("new_group", name, 0, torch.uint8), lambda: made.append(make())).wait()
    finally:
        lane.close(0.0)
    return made[0]
