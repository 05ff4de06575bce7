"""Signals to the launcher."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

# Signals that arrive together are one: a terminal and a wrapper may both pass on the same Ctrl-C.
_SAME_SIGNAL = 0.5
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """The first that ends the job does so with grace, one more, later, kills it. SIGUSR1 and SIGUSR2 are the ranks'."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.first_time = 0.0
        self.kill_now = False
        self.passed_on: list[int] = []
        self.wakeup, self._write = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write, False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._handle)
        for number in PASSED_ON:
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.wakeup)
        os.close(self._write)

    def never_stop(self) -> None:
        """With other hosts a launcher that is stopped (Ctrl-Z) would look lost to them: they would end their ranks."""
        self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)

    def ask(self, number: int) -> None:
        """A host was asked to end (Slurm takes the allocation back): that is meant for the job."""
        if self.first is None:
            self.first, self.first_time = number, time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.ask(number)
        elif time.monotonic() - self.first_time > _SAME_SIGNAL:
            self.kill_now = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.passed_on.append(number)
