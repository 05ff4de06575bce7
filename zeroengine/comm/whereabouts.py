"""What this process is and what its main thread is doing, as others may read it in an error."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, starmap, takewhile
from operator import attrgetter, itemgetter
from pathlib import Path
from types import CodeType

import torch

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_NOT_COLLECTIVE = ("_", "get_", "is_", "destroy_", "wrapper")
MAIN = 0  # the main thread; those that are not Python's, as autograd's for a device, work for it
_GC_IN_ALLOCATION = sys.version_info < (3, 12)


@dataclass(frozen=True)
class Place:
    """Where a thread is: the innermost line of user code, and the torch.distributed call it is in, if any."""

    line: str
    call: str | None = None


_UNKNOWN = Place("no line of user code")


def main_thread_place() -> Place:
    """Samples the main thread's stack from another thread. Costs some tens of microseconds; never raises."""
    return thread_place(threading.main_thread().ident)


def thread_place(ident: int | None) -> Place:
    if ident is None or not getattr(sys, "_is_gil_enabled", lambda: True)():  # nothing would hold the thread still
        return _UNKNOWN
    return place_in((code.co_filename, code.co_name, line) for code, line in _stack(ident))


def _stack(ident: int) -> list[tuple[CodeType, int]]:
    """(code, line) of every frame of a thread, innermost first.

    A loop over `frame.f_back` is no way to read the stack of a thread that runs: between two steps the thread goes on, and
    in CPython 3.11 the next step may then follow a pointer into memory that other frames use by now. So the walk is one
    call of builtins: the GIL is held from its begin to its end, and no frame outlives it. What could let go of the GIL
    inside is a garbage collection, which older interpreters run when they allocate.
    """
    frame = map(itemgetter(ident), starmap(sys._current_frames, [()]))
    frames = takewhile(bool, accumulate(chain(frame, repeat("f_back")), getattr))
    lines = map(attrgetter("f_code", "f_lineno"), frames)
    paused = _GC_IN_ALLOCATION and gc.isenabled()
    if paused:
        gc.disable()
    try:
        return list(lines)
    except KeyError:  # the thread has no Python frame
        return []
    finally:
        if paused:
            gc.enable()


def place_in(stack: Iterable[tuple[str, str, int | None]]) -> Place:
    """The place that a stack of (path, function, line), innermost first, shows."""
    call: str | None = None
    for path, name, line in stack:
        if path.endswith(_C10D) and not name.startswith(_NOT_COLLECTIVE):
            call = name  # the outermost is what the user called
        elif _is_user_code(path):
            return Place(f"{_short(path)}:{line} ({name})", call)
    return Place(_UNKNOWN.line, call)


def _is_user_code(path: str) -> bool:
    return not path.startswith((_PACKAGE, _TORCH, "<")) and f"{os.sep}lib{os.sep}python" not in path


def _short(path: str) -> str:
    return os.path.join(*Path(path).parts[-2:]) if len(Path(path).parts) > 2 else path


def python_threads() -> set[int]:
    """The threads that Python code has started, but the main one."""
    main = threading.main_thread()
    return {t.ident for t in threading.enumerate() if t.ident is not None and t is not main and not isinstance(t, threading._DummyThread)}


def this_thread() -> int:
    ident = threading.get_ident()
    return ident if ident in python_threads() else MAIN


def machine_id() -> str:
    """Equal for two processes when each can see the other in /proc; empty where there is no /proc. The variable ZE_HOST
    tells processes of one machine apart that are to be taken for those of several."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.environ.get('ZE_HOST', '')}"
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks (tells a reused pid apart); None when it is gone or a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


def process_is_stopped(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def other_threads_run() -> bool:
    """Whether a thread of this process but the calling one has work to do, native threads too. False where there is no /proc."""
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return False
    own = str(threading.get_native_id())
    return any(_stat(f"self/task/{thread}")[:1] in (["R"], ["D"]) for thread in threads if thread != own)


def _stat(process: int | str) -> list[str]:
    """Fields of /proc/<process>/stat from the state on (the name before it may contain anything)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
