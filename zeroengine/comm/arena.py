"""The memory of this process that others on its host may read: one file without a name, mapped once.

The file (`memfd_create`) has no entry in any file system: nothing is left when its processes end, whatever way they end,
and /dev/shm's size does not bound it. It is as large as the machine's memory and sparse, so that every peer maps it once
and for all; pages exist where they were written. Tensors of some MiB get large pages where the system has them, all at once: a peer
that reads them maps 2 MiB with one fault, and not 64 KiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import insort
from collections import OrderedDict, deque

import torch
from torch import Tensor

from zeroengine.comm.shm_native import Native

_ALIGN = 1 << 16  # a multiple of the page size of every platform: blocks give whole pages back
_LARGE = 2 << 20  # bytes of a large page, where the system has them: blocks from this size on begin with one
_KEEP = 16 << 20  # bytes of free blocks that keep their pages, for the next block of the same size
_LEAST = 1 << 30
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


class Arena:
    """Blocks of one mapped file. `fd`, `base` (address), `size` (bytes).

    A block from `tensor` is free again when the last tensor that refers to its memory is gone; its pages are kept for a
    block of the same size, up to a bound. After `close` the mapping goes with the last tensor. A forked child sees the
    memory of its parent, as with every shared mapping, and gets ordinary memory from `tensor`.

    Raises OSError where the system has no `memfd_create` or refuses the mapping.
    """

    def __init__(self, native: Native, budget: int) -> None:
        """`budget`: bytes of address space at most."""
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no memfd_create")
        self._native = native
        self._pid = os.getpid()
        self.fd = os.memfd_create("zeroengine", os.MFD_CLOEXEC)
        try:
            self.base, self.size = self._map(min(budget, _machine_memory()))
        except OSError:
            os.close(self.fd)
            raise
        self._mapped = [self.fd]  # emptied by whoever unmaps
        self._lock = threading.Lock()
        self._space: list[tuple[int, int]] = [(0, self.size)]  # (offset, bytes) without pages, ascending
        self._kept: OrderedDict[int, int] = OrderedDict()  # free blocks with pages: offset -> bytes, oldest first
        self._live: dict[int, int] = {}
        self._reserved = 0
        self._returned: deque[int] = deque()  # freed by finalizers, which run anywhere and must not take the lock
        self._closed = False

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised 1-D tensor in the arena, or in ordinary memory when the arena is full."""
        nbytes = numel * dtype.itemsize
        offset = self._allocate(nbytes, written=True)
        if offset is None:
            return torch.empty(numel, dtype=dtype)
        view = _view(self.base + offset, nbytes, _WRITABLE)
        weakref.finalize(view, self._give_back, offset).atexit = False
        with torch.inference_mode(False):  # it may outlive the evaluation in which it was made
            return torch.frombuffer(view, dtype=dtype)

    def reserve(self, nbytes: int, *, counted: bool = True) -> int | None:
        """Offset of a block that lasts as long as the arena; None when there is no room. One that is not `counted` in `bytes` is
        written later or never: `count` says so."""
        offset = self._allocate(nbytes)
        if offset is not None:
            with self._lock:
                size = self._live.pop(offset)
                self._reserved += size if counted else 0
        return offset

    def count(self, nbytes: int) -> None:
        """`nbytes` of reserved memory are in use from now on."""
        with self._lock:
            self._reserved += nbytes

    def bytes(self) -> int:
        """Bytes of blocks in use and of free ones that keep their pages, as far as they were written."""
        with self._lock:
            self._collect()
            return self._reserved + sum(self._live.values()) + sum(self._kept.values())

    def close(self) -> None:
        """Ends the arena; `tensor` raises RuntimeError from now on."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._unmap_if_idle()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _map(self, size: int) -> tuple[int, int]:
        while True:
            os.ftruncate(self.fd, size)
            at: int = self._native.map(self.fd, size, 1)
            if at > 0:
                return at, size
            if size // 2 < _LEAST:
                raise OSError(-at, f"mapping {size >> 20} MiB of shared memory: {os.strerror(-at)}")
            size = size // 2 // _ALIGN * _ALIGN

    def _allocate(self, nbytes: int, *, written: bool = False) -> int | None:
        """Offset of a block, or None. `written`: all of it will be soon."""
        if os.getpid() != self._pid:
            return None
        need = -(-nbytes // _ALIGN) * _ALIGN
        fresh = False
        with self._lock:
            if self._closed:
                raise RuntimeError("shared memory was asked for after its communicators were closed")
            self._collect()
            offset = next((o for o, size in self._kept.items() if size == need), None)
            if offset is not None:
                del self._kept[offset]
            else:
                offset = self._carve(need)
                fresh = offset is not None
            if offset is None:
                return None
            self._live[offset] = need
        if fresh and written:
            self._native.large_pages(self.base + offset, nbytes)  # where the system refuses, they stay small
        return offset

    def _give_back(self, offset: int) -> None:
        if os.getpid() != self._pid:
            return  # a forked child lets go of its copy of a tensor; the memory is still this process' parent's
        self._returned.append(offset)
        if self._closed:
            self._unmap_if_idle()
        elif self._lock.acquire(blocking=False):  # never waits: this may run inside of a call that holds the lock
            try:
                self._collect()
            finally:
                self._lock.release()

    def _unmap_if_idle(self) -> None:
        if len(self._returned) < len(self._live):
            return
        try:
            fd = self._mapped.pop()
        except IndexError:  # another thread's finalizer was first
            return
        self._native.unmap(self.base, self.size)
        os.close(fd)

    def _collect(self) -> None:
        """Takes in what finalizers freed; the oldest free blocks beyond the bound give their pages back."""
        while self._returned:
            offset = self._returned.popleft()
            self._kept[offset] = self._live.pop(offset)
        held = sum(self._kept.values())
        while held > _KEEP:
            offset, size = self._kept.popitem(last=False)
            held -= size
            self._native.discard(self.fd, offset, size)
            self._join(offset, size)

    def _carve(self, need: int) -> int | None:
        align = _LARGE if need >= _LARGE else _ALIGN
        for i, (offset, size) in enumerate(self._space):
            skipped = -offset % align
            left = size - skipped - need
            if left >= 0:
                around = [(offset, skipped), (offset + skipped + need, left)]
                self._space[i : i + 1] = [piece for piece in around if piece[1]]
                return offset + skipped
        return None

    def _join(self, offset: int, size: int) -> None:
        insort(self._space, (offset, size))
        joined: list[tuple[int, int]] = []
        for start, length in self._space:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._space = joined


def _machine_memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return max(_LEAST, total // _ALIGN * _ALIGN)
