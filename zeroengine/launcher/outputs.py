"""The ranks' output as the user sees it: streams of all ranks on the console, and files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from zeroengine.launcher.console import Screen, Stream, screens
from zeroengine.launcher.link import Output
from zeroengine.launcher.plan import Plan

HELD_LINE = 0.1  # seconds after which an unfinished line is shown


class Outputs:
    """Streams by rank of the whole job, made when the rank is first heard of."""

    def __init__(self, plan: Plan, logs: Path | None, idle: Callable[[], None] | None = None) -> None:
        self._plan, self._logs = plan, logs
        self._out, self._err = screens(idle)
        self._streams: dict[tuple[int, int], Stream] = {}
        self._held: dict[Stream, float] = {}
        self._prefixed = plan.prefix

    def expect(self, ranks: range) -> None:
        """Makes the streams of these ranks. Raises `ZeroEngineError` where a file cannot be written."""
        for rank in ranks:
            for number, screen in ((1, self._out), (2, self._err)):
                if (rank, number) not in self._streams:
                    self._streams[rank, number] = self._stream(rank, number, screen)

    def _stream(self, rank: int, number: int, screen: Screen) -> Stream:
        seen = (self._logs is None or self._plan.tee) and (self._plan.show is None or rank in self._plan.show)
        log = self._logs / f"rank{rank}.{'out' if number == 1 else 'err'}" if self._logs is not None else None
        return Stream(screen if seen else None, f"[rank{rank}] " if self._prefixed else "", log)

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def feed(self, rank: int, number: int, data: bytes) -> None:
        """Bytes that a rank wrote to standard output (1) or error (2)."""
        self.expect(range(rank, rank + 1))
        stream = self._streams[rank, number]
        stream.feed(data)
        self._held.pop(stream, None)
        if stream.waiting:
            self._held[stream] = time.monotonic()

    def flush_held(self) -> None:
        """Shows unfinished lines that have waited long enough for their end: prompts, progress bars."""
        due = [s for s, since in self._held.items() if time.monotonic() - since >= HELD_LINE]
        for stream in due:
            stream.flush()
            del self._held[stream]

    def log_error(self, rank: int, text: str) -> None:
        """Adds to the error file of a rank what the launcher shows in its place."""
        if (rank, 2) in self._streams:
            self._streams[rank, 2].log(text.encode(errors="backslashreplace") + b"\n")

    def say(self, text: str) -> None:
        """A message of the launcher's own on standard error."""
        self._err.show(self, b"", f"zerorun: {text}\n".encode(errors="backslashreplace"))

    def pass_on(self, data: bytes) -> None:
        """Whole lines of a transport (ssh, srun) as they are, on standard error."""
        self._err.show(self, b"", data)

    def finish(self) -> None:
        """Shows all that is held back, when no rank is left."""
        for stream in self._streams.values():
            stream.flush()

    def mute(self) -> None:
        """Nobody reads the console any more."""
        self._out = self._err = Screen(os.open(os.devnull, os.O_WRONLY))
        for stream in self._streams.values():
            stream.hide()
        self._held.clear()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


class OwnConsole:
    """The console of a host where the user started the command: shows the ranks of this host, numbered as in the whole job."""

    def __init__(self, plan: Plan, logs: Path | None) -> None:
        self._outputs, self._base = Outputs(plan, logs), 0

    def begin(self, base: int, world: int) -> None:
        self._base = base

    def feed(self, output: Output) -> None:
        self._outputs.feed(self._base + output.local_rank, output.stream, output.data)

    def flush_held(self) -> None:
        self._outputs.flush_held()

    def say(self, text: str) -> None:
        self._outputs.say(text)

    def finish(self) -> None:
        self._outputs.finish()
        self._outputs.close()
