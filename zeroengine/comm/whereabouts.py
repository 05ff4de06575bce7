"""What this process is and what its main thread is doing, as others may read it in an error."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_NOT_COLLECTIVE = ("_", "get_", "is_", "destroy_", "wrapper")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Place:
    """Where a thread is: the innermost line of user code, and the torch.distributed call it is in, if any."""

    line: str
    call: str | None = None


_UNKNOWN = Place("no line of user code")


class MainThread:
    """Samples the main thread's stack from another thread.

    Frame objects of a running thread must not be walked from Python: between two steps the thread runs on, and up to
    CPython 3.11 at least `frame.f_back` then follows a pointer into memory that other frames use by now (a crash), while
    `sys._current_frames` itself can deadlock. `faulthandler` writes all stacks in one call, with the GIL held and without
    a frame object.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)
        self._header = f"Thread 0x{threading.main_thread().ident or 0:016x} "

    def place(self) -> Place:
        """Costs less than a millisecond. A place without a line when the interpreter cannot tell."""
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return _UNKNOWN  # nothing holds the threads still meanwhile
        try:
            self._file.seek(0)
            self._file.truncate()
            faulthandler.dump_traceback(self._file, all_threads=True)
            self._file.seek(0)
            return place_in(self._file.read().decode("utf-8", "replace"), self._header)
        except OSError:  # no room for temporary files
            return _UNKNOWN


def place_in(stacks: str, header: str) -> Place:
    """Reads faulthandler's text: the stack, innermost line first, that follows the line starting with `header`."""
    call: str | None = None
    found = False
    for text in stacks.splitlines():
        if not found:
            found = text.startswith(header)
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            break
        path, number, name = match.groups()
        if path.endswith(_C10D) and not name.startswith(_NOT_COLLECTIVE):
            call = name  # the outermost is what the user called
        elif _is_user_code(path):
            return Place(f"{_short(path)}:{number} ({name})", call)
    return Place(_UNKNOWN.line, call)


def _is_user_code(path: str) -> bool:
    return not path.startswith((_PACKAGE, _TORCH, "<")) and f"{os.sep}lib{os.sep}python" not in path


def _short(path: str) -> str:
    return os.path.join(*Path(path).parts[-2:]) if len(Path(path).parts) > 2 else path


def machine_id() -> str:
    """Equal for two processes when each can see the other in /proc; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks (tells a reused pid apart); None when it is gone or a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


def process_is_stopped(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on (the name before it may contain anything)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
