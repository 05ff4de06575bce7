"""What can be heard of a communicator: each operation from its issue to the end of the wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from zeroengine.comm.protocol import Communicator, Work


class Movement:
    """One operation of `comm` as its listeners see it: `sent` bytes leave this rank. Times are seconds of
    `time.perf_counter`: `issued` by the caller, `began` and `ended` where a thread of this process moved the data (from its turn
    on, with the wait for ranks that come later; None elsewhere), `blocked` how long the caller waited."""

    __slots__ = ("comm", "kind", "subject", "sent", "issued", "began", "ended", "blocked", "marks")

    def __init__(self, comm: Communicator, kind: str, subject: str, sent: int) -> None:
        self.comm = comm
        self.kind = kind
        self.subject = subject
        self.sent = sent
        self.issued = time.perf_counter()
        self.began: float | None = None
        self.ended: float | None = None
        self.blocked = 0.0
        self.marks: tuple[Any, Any] | None = None  # events around the wait, where a device's stream waits and not the host

    @property
    def is_message(self) -> bool:
        """Between two ranks, as in a pipeline."""
        return self.kind in ("send", "recv")

    def waited(self) -> float:
        """Seconds that computation stood still for this operation. Waits for the device if its stream did."""
        if self.marks is None:
            return self.blocked
        before, after = self.marks
        after.synchronize()
        return self.blocked + float(before.elapsed_time(after)) / 1e3


class Listener:
    """Does nothing; a subclass says what it wants to hear. Only communicators of more than one rank are heard."""

    @property
    def hears_runs(self) -> bool:
        """Wants to be there when data move. What native code moves then goes through Python, for as long."""
        return False

    def run_begins(self, movement: Movement) -> None:
        """Data begin to move. In the thread that moves them, if anybody `hears_runs`."""

    def run_ends(self, movement: Movement) -> None:
        """Data have moved, or an error stopped them. In the same thread."""

    def wait_begins(self, movement: Movement) -> None:
        """The caller begins to wait."""

    def wait_ends(self, movement: Movement) -> None:
        """The wait is over, or an error ended it."""


class Watched:
    """`Work` that tells listeners of itself."""

    def __init__(self, work: Work, movement: Movement, listeners: Sequence[Listener]) -> None:
        self._work = work
        self._movement = movement
        self._listeners = listeners

    def wait(self) -> None:
        movement, listeners = self._movement, self._listeners
        self._listeners = ()  # a second wait is no news
        for listener in listeners:
            listener.wait_begins(movement)
        start = time.perf_counter()
        try:
            self._finish(self._work, movement)
        finally:
            movement.blocked += time.perf_counter() - start
            for listener in reversed(listeners):
                listener.wait_ends(movement)

    def done(self) -> bool:
        return self._work.done()

    def polled(self, seconds: float) -> None:
        """The caller did nothing else for so long but ask whether this is done."""
        self._movement.blocked += seconds

    def _finish(self, work: Work, movement: Movement) -> None:
        work.wait()


def heard(run: Callable[[], None], movement: Movement, listeners: Sequence[Listener]) -> Callable[[], None]:
    """`run`, which moves the data of `movement`, with its begin and end told to `listeners`."""

    def told() -> None:
        for listener in listeners:
            listener.run_begins(movement)
        movement.began = time.perf_counter()
        try:
            run()
        finally:
            movement.ended = time.perf_counter()
            for listener in reversed(listeners):
                listener.run_ends(movement)

    return told
