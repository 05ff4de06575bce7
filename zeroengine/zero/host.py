"""What goes back to the system of the host memory that is freed, and what this process keeps."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch
from torch import Tensor

from zeroengine.offload.buffers import host_bytes

_OWN_PAGES = 1 << 16  # bytes from which memory is mapped and not taken from the heap
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def host_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros, in pages of their own unless they are few."""
    size = numel * dtype.itemsize
    return torch.zeros(numel, dtype=dtype) if size < _OWN_PAGES else host_bytes(size).view(dtype)


class HeapTrimmer:
    """Gives free pages inside the C heap back. glibc keeps what lies below its top, and torch's aligned allocations rarely
    fit into a hole of their own size: a process that builds layers and cuts them would grow to the whole model. Where the C
    library has no such call, nothing is done."""

    def __init__(self, every: int = 1 << 20) -> None:
        self._every = every
        self._freed = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._trim: Callable[[int], int] | None = trim

    def freed(self, nbytes: int) -> None:
        """Counts memory that was freed, and trims when enough came together."""
        self._freed += nbytes
        if self._freed >= self._every:
            self.trim()

    def trim(self) -> None:
        self._freed = 0
        if self._trim is not None:
            self._trim(0)


def keep_freed_memory(device: torch.device) -> None:
    """Lets this process keep what the steps free, where they compute in host memory.

    glibc's malloc returns large blocks to the system as soon as they are free, and takes them again with a page fault for every
    4 KiB: activations and gradients of each step. The peak stays what it is. Other allocators, and thresholds that the environment
    gives (mallopt(3)), are left alone.
    """
    told = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"} & os.environ.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" and os.name == "posix" and not told else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes everywhere
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
