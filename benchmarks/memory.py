"""What this process occupies, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the present VmRSS and touches nothing else


def _kib(field: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return None


def resident_bytes() -> int | None:
    """Resident set size in bytes; None where there is no /proc."""
    kib = _kib("VmRSS")
    return None if kib is None else kib * 1024


def shared_bytes() -> int | None:
    """The part of the resident set that is shared memory (counted once in every process that maps it)."""
    kib = _kib("RssShmem")
    return None if kib is None else kib * 1024


def peak_bytes() -> int | None:
    """Highest resident set since the last `reset_peak`, in bytes; None where there is no /proc."""
    kib = _kib("VmHWM")
    return None if kib is None else kib * 1024


def reset_peak() -> bool:
    """Lets `peak_bytes` start again from the present; False where the kernel does not let us."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def sent_over_loopback() -> int | None:
    """Bytes that the loopback interface has carried, headers included; None where there is no /proc."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return None
