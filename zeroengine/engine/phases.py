"""Time of the phases of a step, for `wall_clock_breakdown`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class PhaseTimes:
    """Seconds spent in each phase since the last `take`. Where the device runs behind the host it is waited for at both ends
    of a phase, so that a phase is charged with its own work. Does nothing unless `enabled`."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._waits = device.type != "cpu"
        self._seconds: dict[str, float] = {}
        self._depth = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the time inside to `name`. A phase inside another (a forward that backward runs again) belongs to the outer."""
        if not self.enabled or self._depth:
            yield
            return
        start = self._now()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def _now(self) -> float:
        if self._waits:
            torch.accelerator.synchronize()
        return time.perf_counter()
