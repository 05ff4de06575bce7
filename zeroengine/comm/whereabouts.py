"""What this process is and what its main thread is doing, as others may read it in an error."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_PEER_ARGUMENTS = ("dst", "src")
_POINT_TO_POINT = ("send", "recv", "isend", "irecv")
_NOT_COLLECTIVE = ("_", "get_", "is_", "destroy_", "wrapper")


@dataclass(frozen=True)
class Place:
    """Where a thread is: the innermost line of user code, and the torch.distributed call it is in, if any."""

    line: str
    call: str | None = None
    call_ranks: tuple[int, ...] | None = None  # the ranks it needs; None: all


def main_thread_place() -> Place:
    """Samples the main thread's stack. Costs microseconds; never raises."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    call, ranks = None, None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(_C10D) and not frame.f_code.co_name.startswith(_NOT_COLLECTIVE):
            call, ranks = frame.f_code.co_name, _ranks_of_call(frame)  # the outermost is what the user called
        elif _is_user_code(path):
            return Place(f"{_short(path)}:{frame.f_lineno} ({frame.f_code.co_name})", call, ranks)
        frame = frame.f_back
    return Place("no line of user code", call, ranks)


def _is_user_code(path: str) -> bool:
    return not path.startswith((_PACKAGE, _TORCH, "<")) and f"{os.sep}lib{os.sep}python" not in path


def _short(path: str) -> str:
    return os.path.join(*Path(path).parts[-2:]) if len(Path(path).parts) > 2 else path


def _ranks_of_call(frame: FrameType) -> tuple[int, ...] | None:
    values = frame.f_locals
    if frame.f_code.co_name in _POINT_TO_POINT:
        peers = [values.get(name) for name in _PEER_ARGUMENTS]
        return tuple(p for p in peers if isinstance(p, int)) or None
    members = values.get("ranks")  # new_group
    if isinstance(members, (list, tuple)) and members and all(isinstance(r, int) for r in members):
        return tuple(members)
    group = values.get("group")
    try:
        return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else None
    except (KeyError, ValueError, RuntimeError):  # a group that is being destroyed
        return None


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
