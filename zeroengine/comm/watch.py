"""The watch of a communicator: waits for other ranks, and names them when they do not come."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zeroengine.comm.diagnosis import Diagnosis, Verdict
from zeroengine.comm.health import Monitor
from zeroengine.comm.lane import Lane, Operation
from zeroengine.comm.status import Wait
from zeroengine.comm.whereabouts import this_thread
from zeroengine.errors import DivergenceError, RankError
from zeroengine.logging import logger
from zeroengine.wording import first_line

_REMEDY_DEAD = "Look at the output of that rank for the first error; this rank ends because it cannot go on alone."
_REMEDY_DIVERGED = (
    "Every rank must reach the same operations in the same order; look for a branch, an early return or a different "
    "number of steps that depends on the rank or on its data."
)


class HealthWatch:
    """Waits for operations; within `timeout` seconds it raises when a rank died, stopped, failed, exited or waits for
    us elsewhere. A rank that is alive in user code is only slow: one warning, and patience up to `stall_timeout`."""

    def __init__(self, monitor: Monitor, timeout: float, stall_timeout: float) -> None:
        self._monitor = monitor
        self._timeout = timeout
        self._stall_timeout = stall_timeout
        self._first = timeout / 10
        self._stale = timeout / 2

    def watch(self, lane: Lane) -> None:
        self._monitor.add_lane(lane)

    def unwatch(self, lane: Lane) -> None:
        self._monitor.remove_lane(lane)

    def until(self, operation: Operation) -> None:
        start = time.monotonic()
        if operation.finished_within(self._first):
            return
        with self._monitor.waiting(self._wait_of(operation)):
            self._until(operation, start)

    def _until(self, operation: Operation, start: float) -> None:
        earlier: Verdict | None = None
        warned = False
        poll = min(0.25, self._timeout / 20)
        last = time.monotonic()
        while not operation.finished_within(poll):
            now = time.monotonic()
            if now - last > poll + self._stale / 2:  # we were stopped ourselves
                self._monitor.restart_clocks()
            last, waited = now, now - start
            wait = self._wait_of(operation)
            verdict = self._verdict(wait, waited)
            error = self._judge(verdict, earlier, wait, waited)
            if error is not None:
                operation.lane.poison(error)
                return
            if verdict.cause != "divergence":
                earlier = None
            elif earlier is None or verdict.waits != earlier.waits:
                earlier = verdict
            if verdict.cause == "slow" and waited > self._timeout and not warned:
                warned = True
                logger.warning("waiting for %s since %.0f s: %s", wait.what, waited, verdict.text)

    def explain(self, lane: Lane, what: str, error: Exception) -> Exception:
        """Looks at the peers for a few seconds: the rank that closed a connection first is the one to name."""
        if isinstance(error, RankError):
            return error
        head = lane.head()
        wait = Wait(lane.key, head.index if head else 0, what, list(lane.peers), thread=this_thread())
        deadline = time.monotonic() + min(4.0, 0.4 * self._timeout)
        with self._monitor.waiting(wait):
            while True:
                verdict = self._verdict(wait, 0.0)
                if verdict.cause == "dead" or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        if verdict.cause == "dead":
            return self._ended(verdict, wait, error)
        found = f" ({verdict.text})" if verdict.text else ""
        text = f"it failed: {_reason(error)}. No other rank is known to be dead{found}."
        return self._error(RankError, wait, text, "Look at the other ranks' output and at the network.", error)

    def _judge(self, verdict: Verdict, earlier: Verdict | None, wait: Wait, waited: float) -> RankError | None:
        if verdict.cause == "dead":
            return self._ended(verdict, wait)
        if verdict.cause == "divergence" and verdict.confirms(earlier):
            text = f"ranks wait for each other in different operations: {verdict.text}."
            return self._error(DivergenceError, wait, text, _REMEDY_DIVERGED)
        if waited > self._stall_timeout:
            text = f"it did not end within {self._stall_timeout:g} s; {verdict.text or 'every rank takes part'}."
            return self._error(RankError, wait, text, "Raise the stall timeout if that is not a fault.")
        return None

    def _ended(self, verdict: Verdict, wait: Wait, cause: Exception | None = None) -> RankError:
        known = self._monitor.failure
        if known is not None and (verdict.unsaid or self._monitor.store_silent() > 0):
            return known  # told by another thread of ours; nothing is read after it
        if verdict.diverged:
            return self._error(DivergenceError, wait, f"{verdict.text}.", _REMEDY_DIVERGED, cause)
        return self._error(RankError, wait, f"{verdict.text}.", _REMEDY_DEAD, cause, verdict.ranks)

    def _verdict(self, wait: Wait, waited: float) -> Verdict:
        m, silent = self._monitor, self._monitor.store_silent()
        if silent > 0 and m.store_host is None and silent > self._stale:
            return Verdict("dead", "the job's store, kept by the launcher, does not answer: the launcher is gone or stopped")
        if silent > 0 and m.store_host is not None and m.store_host != m.rank:
            host = m.view(m.store_host)
            gone = host.process(m.machine) in ("gone", "stopped") or silent > self._stale
            # a group without the store's rank may outlive it, but nothing more can be learnt about its ranks
            if gone and (m.store_host in wait.ranks or waited > self._timeout):
                known = Diagnosis(m.rank, wait, m.own(), m.view, m.machine, self._stale)
                ended = known.how_it_ended(host) if host.status else f"rank {host.rank} is gone or stopped"
                text = f"{ended} (the job's store, which it keeps, does not answer)"
                return Verdict("dead", text, (host.rank,))
        stale = self._stale if silent == 0 else float("inf")  # no news from a silent store says nothing about a peer
        verdict = Diagnosis(m.rank, wait, m.own(), m.view, m.machine, stale).verdict()
        if verdict.unsaid and silent == 0:
            m.read_again(self._first)  # its last words may be newer than what was read before it went
            verdict = Diagnosis(m.rank, wait, m.own(), m.view, m.machine, stale).verdict()
        return verdict

    def _wait_of(self, operation: Operation) -> Wait:
        head = operation.lane.head() or operation
        ranks = sorted({*operation.lane.peers, self._monitor.rank})
        return Wait(operation.lane.key, head.index, head.describe(), ranks, thread=this_thread())

    def _error(
        self, kind: type[RankError], wait: Wait, text: str, remedy: str, cause: Exception | None = None, lost: Sequence[int] = ()
    ) -> RankError:
        error = kind(f"rank {self._monitor.rank} waits for {wait.what}: {text} {remedy}")
        error.__cause__ = cause
        self._monitor.note_failure(error, lost)
        return error


def _reason(error: Exception) -> str:
    """Without Gloo's advice to look at other ranks' logs, which is ours to give."""
    return first_line(error, 300).partition(". This is typically")[0]
