"""`comms_logger`: what the communicators moved, how often, how fast, and who waited for whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroengine.comm.listening import Movement
from zeroengine.config.monitoring import CommsLoggerSection
from zeroengine.logging import logger
from zeroengine.monitor.observer import MOST_WAITS, Observer, Step
from zeroengine.monitor.words import aligned, in_bytes

_GB = 1e9


@dataclass
class Row:
    """Operations of one kind on one stream that move the same number of bytes. `moving`: seconds in which the data moved, of the
    `timed` operations that say so; `waiting`: seconds in which this rank did nothing else."""

    stream: str
    dims: str
    ranks: int
    kind: str
    sent: int
    what: str
    count: int = 0
    timed: int = 0
    moving: float = 0.0
    waiting: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.stream}|{self.kind}|{self.sent}|{self.what}"

    @property
    def bandwidth(self) -> float | None:
        """Bytes that this rank sent a second, from when all ranks had come to when the data were there."""
        return self.sent * self.timed / self.moving if self.moving and self.sent else None


class CommsLogger(Observer):
    """Adds operations up by stream, kind and size (with `debug` also by what is moved). `dims` names the dimensions of the mesh
    that ranks span; `gather` brings a text from every rank (collective)."""

    listens = True

    def __init__(self, section: CommsLoggerSection, dims: Callable[[tuple[int, ...]], str], gather: Callable[[str], Sequence[str]]) -> None:
        self._kinds = None if section.prof_all else frozenset(section.prof_ops)
        self._verbose, self._debug = section.verbose, section.debug
        self._dims, self._gather = dims, gather
        self._rows: dict[tuple[str, str, int, str], Row] = {}
        self._waits: list[Movement] = []

    @property
    def rows(self) -> list[Row]:
        """Those that moved most come first."""
        self._settle()
        return sorted(self._rows.values(), key=lambda r: (-r.sent * r.count, r.stream, r.kind, -r.sent))

    def wait_ends(self, movement: Movement) -> None:
        if self._kinds is not None and movement.kind not in self._kinds:
            return
        self._waits.append(movement)
        if len(self._waits) >= MOST_WAITS:  # many forwards without a step
            self._settle()
        if self._verbose:
            moved = "" if movement.began is None or movement.ended is None else f", {1e3 * (movement.ended - movement.began):.3f} ms"
            logger.info(
                "%s on %s (%d ranks): %s, %s sent%s, waited %.3f ms", movement.kind, movement.comm.name, movement.comm.size,
                movement.subject, in_bytes(movement.sent), moved, 1e3 * movement.blocked,
            )  # fmt: skip

    def step_ended(self, step: Step) -> None:
        self._settle()

    def summary(self, show_straggler: bool = False) -> str:
        """A table. With `show_straggler` (collective) also by how much this rank waited more than the one that waited least: time
        that went to slower ranks, and not to moving data."""
        rows = self.rows
        least = self._least(rows) if show_straggler else {}
        head = ["stream", "dims", "ranks", "operation", "sent", "count", "in all", "moving ms", "GB/s", "waiting ms"]
        table = [[*head, *(["of it for slower ranks"] if show_straggler else []), *(["what"] if self._debug else [])]]
        for r in rows:
            speed = r.bandwidth
            cells = [
                r.stream, r.dims, str(r.ranks), r.kind, in_bytes(r.sent), str(r.count), in_bytes(r.sent * r.count),
                f"{1e3 * r.moving:.2f}" if r.timed else "-", "-" if speed is None else f"{speed / _GB:.3g}", f"{1e3 * r.waiting:.2f}",
            ]  # fmt: skip
            if show_straggler:
                cells.append(f"{1e3 * (r.waiting - least[r.key]):.2f}")
            table.append([*cells, *([r.what] if self._debug else [])])
        return aligned(table)

    def _least(self, rows: list[Row]) -> dict[str, float]:
        found: dict[str, float] = {}
        for text in self._gather(json.dumps({r.key: r.waiting for r in rows})):
            for key, seconds in json.loads(text).items():
                found[key] = min(seconds, found.get(key, seconds))
        return found

    def _settle(self) -> None:
        for m in self._waits:
            what = m.subject if self._debug else ""
            key = (m.comm.name, m.kind, m.sent, what)
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = Row(m.comm.name, self._dims(m.comm.ranks), m.comm.size, m.kind, m.sent, what)
            row.count += 1
            row.waiting += m.waited()
            if m.began is not None and m.ended is not None:
                row.timed += 1
                row.moving += m.ended - m.began
        self._waits.clear()
