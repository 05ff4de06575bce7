"""Memory of large CPU tensors: torch gets an allocator (csrc/heap) that fills every hole it leaves and keeps its pages.

It serves blocks of 64 KiB and more from one reserved range as large as the machine's memory; smaller ones, and what does not
fit, come from torch's own allocator. There is one in a process. Tensors of it stay valid whatever torch uses later.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from zeroengine.ops.registry import choose

_OTHER = -1  # Answer of csrc/heap/heap.cpp


@dataclass(frozen=True)
class Held:
    """Bytes in blocks in use; in pages that have memory, of free blocks too; and the most in use since the last step ended."""

    live: int
    kept: int
    peak: int


class Heap:
    """The allocator; torch has it once it is installed."""

    serves = False  # whether torch has one, as far as this class was asked

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._dll = dll

    def install(self) -> bool:
        """Gives torch the allocator; False where torch has another one than its own, which stays. Not while other threads make
        tensors. Raises OSError where the system gives no such range."""
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        answer = self._dll.ze_heap_install(ctypes.c_int64(size))
        if answer > 0:
            raise OSError(answer, os.strerror(answer))
        Heap.serves = answer != _OTHER
        return Heap.serves

    def uninstall(self) -> None:
        """Gives torch its own allocator back, unless it was given another one since."""
        self._dll.ze_heap_uninstall()
        Heap.serves = False

    def trim(self) -> None:
        """Gives whole pages of free blocks back to the system."""
        self._dll.ze_heap_trim()

    def step_ended(self) -> None:
        """Trims if what is kept is more than half, and more than 64 MiB, beyond the most that was in use in the last 16 steps."""
        self._dll.ze_heap_step_ended()

    def held(self) -> Held:
        numbers = (ctypes.c_int64 * 3)()
        self._dll.ze_heap_stats(numbers)
        return Held(*numbers)


def find_heap() -> Heap | None:
    """None where there is no native library. Raises as `choose`."""
    dll = choose("heap", torch.device("cpu")).dll
    return None if dll is None else Heap(dll)
