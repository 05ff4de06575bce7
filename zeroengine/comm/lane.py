"""An ordered stream of operations: a queue, one worker thread, and handles to wait on."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from zeroengine.comm.fingerprint import Fingerprint
from zeroengine.comm.stream import Order, Stream, Turn

_T = TypeVar("_T")
_END_SECONDS = 5.0  # for a thread that has nothing left to do


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
    """`Work` of a lane. Holds its tensors (through the closure it runs) until it is finished. `native`: the stream does it, and
    `run` raises the error of one that has failed."""

    __slots__ = ("lane", "index", "fingerprint", "native", "_run", "_finished", "_error")

    def __init__(self, lane: Lane, index: int, fingerprint: Fingerprint, run: Callable[[], None], native: bool = False) -> None:
        self.lane = lane
        self.index = index
        self.fingerprint = fingerprint
        self.native = native
        self._run: Callable[[], None] | None = run
        self._finished = False
        self._error: Exception | None = None

    def wait(self) -> None:
        if not self.done():
            self.lane.watch.until(self)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def done(self) -> bool:
        if not self._finished and self.lane.passed(self.index):
            self.lane.retire()
        return self._finished

    @property
    def error(self) -> Exception | None:
        """What it ended with, if with an error."""
        return self._error

    def finished_within(self, seconds: float) -> bool:
        if not self._finished:
            self.lane.wait(self.index, seconds)
        return self.done()

    def span(self) -> tuple[float, float] | None:
        """Seconds of `time.perf_counter` between which it ran, where the lane knows."""
        return self.lane.span(self.index)

    def finish(self, error: Exception | None = None) -> Callable[[], None] | None:
        """By the lane, under its lock. The closure is to be dropped after it: the tensors in it may run code as they go."""
        if not self._finished:
            self._error = error
            self._finished = True
        run, self._run = self._run, None
        return run

    def execute(self) -> None:
        run = self._run
        if run is not None:
            run()

    def release(self) -> None:
        """Lets go of the tensors: they have moved."""
        self._run = None

    def describe(self) -> str:
        return f"{self.fingerprint.describe()} ({self.lane.key}, operation {self.index})"


class Line(Protocol):
    """The operations of a lane in their order, as a `Stream` keeps them: by number."""

    def put(self, order: Order | None) -> None: ...

    def serve(self) -> Turn: ...

    @property
    def done(self) -> int: ...

    def wait(self, index: int, seconds: float) -> None: ...

    @property
    def busy(self) -> bool: ...

    def span(self, index: int) -> tuple[float, float] | None: ...

    def stop(self) -> None: ...

    def give_up(self) -> None: ...

    def close(self) -> None: ...


class Queue:
    """A `Line` of operations that Python does."""

    busy = False  # in native code of its own

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._passed = threading.Condition()
        self._taken = False
        self._given_up = False
        self.done = 0

    def put(self, order: Order | None) -> None:
        del order
        self._orders.put(True)

    def serve(self) -> Turn:
        if self._taken:
            self._taken = False
            with self._passed:
                self.done += 1
                self._passed.notify_all()
        self._taken = self._orders.get()
        return Turn.FOREIGN if self._taken else Turn.CLOSED

    def wait(self, index: int, seconds: float) -> None:
        with self._passed:
            self._passed.wait_for(lambda: self._given_up or self.done > index, seconds)

    def span(self, index: int) -> tuple[float, float] | None:
        return None  # who wants to know is there when Python runs it

    def stop(self) -> None:
        return  # nothing runs that the lane does not give to the thread

    def give_up(self) -> None:
        with self._passed:
            self._given_up = True
            self._passed.notify_all()

    def close(self) -> None:
        self._orders.put(False)


class Lane:
    """Operations of one stream, run one after another by a daemon thread.

    `key` names the stream alike on every rank that takes part; `peers` are the other ranks (global) whose operations
    meet ours. An error poisons the lane: every later operation fails with the same error, and `interrupt` asks the
    transport to give up the one that runs. With `stream` the thread leaves native code only for operations without an order.
    """

    def __init__(
        self,
        key: str,
        peers: Sequence[int],
        watch: Watch,
        verify: Callable[[Operation], None] | None,
        interrupt: Callable[[], None] | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.key = key
        self.peers = peers
        self.watch = watch
        self.issued = 0
        self.issuer = threading.get_ident()  # the thread that did it last, or may be about to
        self._pid = os.getpid()
        self.error: Exception | None = None
        self._pending: dict[int, Operation] = {}  # ascending
        self._line: Line = Queue() if stream is None else stream
        self._lock = threading.Lock()
        self._verify = verify
        self._interrupt = interrupt
        self._busy = False
        self._closed = False
        self._held: object = None  # tensors of what ran when the lane was poisoned
        self._thread = threading.Thread(target=self._work, name=f"zeroengine {key}", daemon=True)
        watch.watch(self)
        self._thread.start()

    def submit(self, fingerprint: Fingerprint, run: Callable[[], None], order: Order | None = None) -> Operation:
        """`order`: what the stream does, instead of `run`."""
        if os.getpid() != self._pid:  # of which a thread may hold the lock
            raise RuntimeError(
                f"communicator {self.key!r} belongs to process {self._pid}, of which this one was forked: call init_distributed and "
                "make a communicator here, or leave collectives to the parent"
            )
        with self._lock:
            if self.error is not None:
                raise self.error.with_traceback(None)
            if self._closed:
                raise self._no_more()
            operation = Operation(self, self.issued, fingerprint, run, order is not None)
            try:
                self._pending[operation.index] = operation
                self.issued += 1
                self.issuer = threading.get_ident()
                if order is not None:
                    order.sign(fingerprint, operation.index)
                self._line.put(order)
            except BaseException as error:  # as a signal: nobody knows which numbers the line has given
                self.error = RuntimeError(f"{operation.describe()} was broken off as it was issued ({type(error).__name__})")
                raise
            gone = self._retire()
        del gone
        return operation

    def passed(self, index: int) -> bool:
        """Operation `index` was done."""
        return self._line.done > index

    def wait(self, index: int, seconds: float) -> None:
        """Returns when operation `index` was done, when the lane is poisoned, or after so many seconds."""
        self._line.wait(index, seconds)

    def span(self, index: int) -> tuple[float, float] | None:
        """When operation `index` ran, of the last few that were native."""
        return self._line.span(index)

    def retire(self) -> None:
        """Lets go of the tensors of what is done."""
        with self._lock:
            gone = self._retire()
        del gone

    def head(self) -> Operation | None:
        """The oldest unfinished operation: what this rank is really held up by."""
        with self._lock:
            gone = self._retire()
            first = next(iter(self._pending.values()), None)
        del gone
        return first

    def poison(self, error: Exception) -> None:
        self._line.stop()
        with self._lock:
            gone = self._retire()  # what was done before it is good
            self.error = self.error or error
            pending, self._pending = self._pending, {}
            running = self._line.done if self._line.busy else None
            for operation in pending.values():
                gone.append(operation.finish(self.error))
                if operation.index == running:
                    self._held = gone[-1]
        del gone
        self._line.give_up()
        interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    def running(self) -> bool:
        return self._thread.is_alive()

    def busy(self) -> bool:
        """Whether the thread is inside an operation, that is in the transport's native code."""
        return (self._busy or self._line.busy) and self._thread.is_alive()

    def close(self, seconds: float) -> None:
        """Ends the thread after what is queued; one that a dead peer holds up is left to the end of the process."""
        with self._lock:
            self._closed = True
        self._line.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        if not self.running():
            self.retire()
            self._verify = self._interrupt = None  # they hold the process group
        if self.error is None:
            if not self.busy():  # one that is stuck in the transport still counts when the process ends
                self.watch.unwatch(self)  # before it has an error, which would be told to the others
            self.error = self._no_more()

    def _no_more(self) -> Exception:
        return RuntimeError(f"communicator {self.key!r} is closed")

    def _retire(self) -> list[object]:
        """Finishes what is done; the closures, to be dropped after the lock."""
        gone: list[object] = []
        done = self._line.done
        while self._pending and (first := next(iter(self._pending))) < done:
            gone.append(self._pending[first].finish())
            del self._pending[first]  # after it: a signal in between must not leave one that nobody finishes
        return gone

    def _work(self) -> None:
        with torch.inference_mode():  # results may be written into inference tensors as well as into ordinary ones
            while self._line.serve() is not Turn.CLOSED:
                self._held = None
                operation = self._pending.get(self._line.done)
                if operation is not None:  # else the lane was poisoned meanwhile
                    self._run_one(operation)
                del operation  # an idle lane holds no tensors
            self._held = None

    def _run_one(self, operation: Operation) -> None:
        try:
            self._busy = True
            if self._verify is not None and not operation.native:
                self._verify(operation)
            operation.execute()
        except Exception as error:  # handed to whoever waits
            self._busy = False
            known = self.error  # it was given up because of it
            self.poison(known or self.watch.explain(self, operation.describe(), error))
            return
        self._busy = False
        operation.release()


def create_in_lane(name: str, peers: Sequence[int], watch: Watch, make: Callable[[], _T]) -> _T:
    """What `make` returns, which waits for all `peers` to make group `name` with it: in a lane of its own, so that one that never
    comes is named."""
    made: list[_T] = []
    lane = Lane(f"creation of {name}", peers, watch, None)
    patience = 0.0  # its thread may wait for ever for a rank that does not come
    try:
        lane.submit(Fingerprint("new_group", name, 0, torch.uint8), lambda: made.append(make())).wait()
        patience = _END_SECONDS
    finally:
        lane.close(patience)
    return made[0]
