"""Host memory that goes back to the system as soon as it is free."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from zeroengine.offload.buffers import host_bytes

_OWN_PAGES = 1 << 16  # bytes from which memory is mapped and not taken from the heap


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
