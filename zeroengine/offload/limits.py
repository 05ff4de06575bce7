"""How much more memory this process may take, and from whom."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20


@dataclass(frozen=True)
class Room:
    """`nbytes` more may be taken before `limit` says no. `shared`: by all processes of this host's job together."""

    nbytes: int
    limit: str
    shared: bool


def hard_limits() -> list[Room]:
    """What bounds this process: its address space (ulimit -v), and the memory of its control group."""
    found = []
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _status("VmSize")
    if soft != resource.RLIM_INFINITY and used is not None:
        found.append(Room(soft - used, f"the address space of the process, {soft // _MIB} MiB (ulimit -v)", False))
    group = _control_group()
    if group is not None:
        found.append(group)
    return found


def free_memory() -> Room | None:
    """What the machine has left."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return Room(int(line.split()[1]) * 1024, "the memory of the machine", True)
    except (OSError, ValueError):
        pass
    return None


def too_much(needed: int, rooms: list[Room]) -> Room | None:
    """The first of `rooms` that `needed` more bytes in each process of the job on this host would not fit into."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return next((room for room in rooms if needed * (local if room.shared else 1) > room.nbytes), None)


def _status(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _control_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Room | None:
    """The tightest memory limit among the version 2 groups of this process. What files are cached of is given back on demand."""
    try:
        path = next(line.partition("::")[2] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    tightest: Room | None = None
    group = root / path.lstrip("/")
    while group == root or root in group.parents:
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            room = limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            if tightest is None or room < tightest.nbytes:
                tightest = Room(room, f"the control group {group}, {limit // _MIB} MiB", True)
        except (OSError, ValueError):  # no limit ("max"), or none of ours to see
            pass
        group = group.parent
    return tightest
