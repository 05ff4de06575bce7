"""Where the ranks' output goes: whole lines to the console under the rank's name, raw bytes to a file per stream."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from zeroengine.errors import ZeroEngineError


class Screen:
    """One place that shows lines (a terminal, a file, a pipe), shared by streams so that their lines stay whole."""

    def __init__(self, fd: int, idle: Callable[[], None] | None = None) -> None:
        """`idle` is called while the place takes nothing, such as a terminal that was stopped."""
        self._fd, self._idle = fd, idle
        self._owner: object | None = None  # whose unfinished line stands at the end

    def show(self, owner: object, prefix: bytes, line: bytes) -> None:
        """Writes one line or part of one. A part that ends in a carriage return, or in nothing, is a progress bar: its
        line stays open, and the next part of the same owner continues it."""
        if self._owner is not None and self._owner is not owner:
            self._write(b"\n")
            self._owner = None
        fresh = self._owner is None or line.startswith(b"\r")
        start = b"\r" if line.startswith(b"\r") else b""
        self._write(start + (prefix if fresh else b"") + line[len(start) :])
        self._owner = None if line.endswith(b"\n") else owner

    def _write(self, data: bytes) -> None:
        if self._idle is None:
            while data:
                data = data[os.write(self._fd, data) :]
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while data:
            if poll.poll(200):  # then a pipe or a terminal takes this much without waiting
                data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]
            else:
                self._idle()


class Stream:
    """Output of one rank, standard or error: `feed` takes bytes as they come."""

    def __init__(self, screen: Screen | None, prefix: str, log: Path | None) -> None:
        self._screen, self._prefix = screen, prefix.encode()
        self._log: BinaryIO | None = None
        if log is not None:
            try:
                self._log = log.open("wb", buffering=0)
            except OSError as error:
                raise ZeroEngineError(f"--log-dir: cannot write {log}: {error.strerror}") from None
        self._rest = b""

    def feed(self, data: bytes) -> None:
        self.log(data)
        if self._screen is None:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show(line + b"\n")

    def log(self, data: bytes) -> None:
        """To the rank's file only."""
        if self._log is not None:
            self._log.write(data)

    @property
    def waiting(self) -> bool:
        """True if an unfinished line is held back."""
        return bool(self._rest)

    def flush(self) -> None:
        """Shows the unfinished line."""
        if self._rest:
            line, self._rest = self._rest, b""
            self._show(line)

    def hide(self) -> None:
        """No more on the screen."""
        self._screen = None

    def close(self) -> None:
        """Closes the file; what is held back is not shown."""
        if self._log is not None:
            self._log.close()

    def _show(self, line: bytes) -> None:
        if self._screen is None:
            return
        # Of many states of a progress bar that came at once only the last would stay visible.
        body, end = (line[:-1], b"\n") if line.endswith(b"\n") else (line, b"")
        if b"\r" in body.rstrip(b"\r"):
            body = b"\r" + body.rstrip(b"\r").rpartition(b"\r")[2]
        self._screen.show(self, self._prefix, body + end)


def screens(idle: Callable[[], None] | None = None) -> tuple[Screen, Screen]:
    """Screens of standard output and error; one and the same where both lead to the same place."""
    out, err = os.fstat(1), os.fstat(2)
    first = Screen(1, idle)
    return first, first if (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino) else Screen(2, idle)
