"""Which buckets to keep and to fetch ahead: a pure decision on the order of uses seen last time.

Every phase (training forward, evaluation, backward) has its own record. The record of the last pass is the prediction of
this one; a bucket that comes out of order only moves the pointer, so another branch, a skipped layer or an evaluation in
between costs prefetching, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

_LOOKAHEAD = 64  # uses; bounds the host time of one decision


@dataclass
class _Record:
    last: list[int] = field(default_factory=list)
    now: list[int] = field(default_factory=list)
    at: int = 0

    def restart(self) -> None:
        if self.now:
            self.last, self.now = self.now, []
        self.at = 0

    def visit(self, bucket: int) -> None:
        self.now.append(bucket)
        # The usual case is the next entry; otherwise the nearest later one, otherwise stay where we are.
        for i in range(self.at, min(self.at + _LOOKAHEAD, len(self.last))):
            if self.last[i] == bucket:
                self.at = i + 1
                return

    def upcoming(self) -> list[int]:
        return self.last[self.at : self.at + _LOOKAHEAD]


class GatherWindow:
    """Decides, at each use of a bucket, which others stay gathered and which are fetched.

    `sizes`: elements of each bucket. `prefetch`: elements to fetch ahead; None means one bucket. `reuse`: a bucket that
    comes again within so many elements of gathered buckets is kept. `live`: cap on gathered elements in total.
    """

    def __init__(self, sizes: list[int], prefetch: int | None, reuse: int, live: int) -> None:
        self._sizes, self._prefetch, self._reuse, self._live = sizes, prefetch, reuse, live
        self._records: dict[Hashable, _Record] = {}
        self._previous: int | None = None

    def restart(self, phase: Hashable) -> None:
        """A new pass of `phase` begins."""
        self._records.setdefault(phase, _Record()).restart()
        self._previous = None

    def upcoming(self, phase: Hashable) -> list[int]:
        """Buckets that were used next in the last pass of `phase`, after the use where this one is."""
        record = self._records.get(phase)
        return record.upcoming() if record else []

    def visit(self, phase: Hashable, bucket: int, gathered: Callable[[int], bool]) -> tuple[set[int], list[int]]:
        """`bucket` is used now. Returns (buckets to keep gathered, buckets to fetch, in order)."""
        record = self._records.setdefault(phase, _Record())
        record.visit(bucket)
        keep: set[int] = {bucket}
        fetch: list[int] = []
        upcoming = record.upcoming()
        if not record.last and self._previous is not None:
            keep.add(self._previous)  # no prediction yet: two buckets that alternate must not be gathered in turn
        live, ahead, distance = self._sizes[bucket], 0, 0
        for nxt in upcoming:
            if nxt in keep:
                continue
            size = self._sizes[nxt]
            if live + size > self._live:
                break
            new = not gathered(nxt)
            if self._prefetch is None:
                wanted = not ahead
            else:
                wanted = ahead + size <= self._prefetch
            if not wanted and not (not new and distance + size <= self._reuse):
                break
            keep.add(nxt)
            live, ahead, distance = live + size, ahead + size, distance + size
            if new:
                fetch.append(nxt)
        self._previous = bucket
        return keep, fetch
