"""Memory of tensors that are read and written from end to end together: an optimizer step is as fast as memory is.

Large pages, since reading ahead stops at the end of every page. And addresses that are apart modulo 4 KiB: equal ones share a set
of the nearest cache (32 KiB, 8 ways) and what is behind it; the update of four such tensors is a fifth slower.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from zeroengine.ops.heap import Heap
from zeroengine.ops.native import OF_TORCH

_SMALL = 1 << 16  # bytes below which a tensor is torch's: few of them, or none of them matters
_CHUNK = 32 << 20
_PIECES = 16  # of a chunk, of which each may lie some way behind the one before it
_LINE = 64
_SETS = 4096  # bytes after which the sets of the nearest cache begin again
_APART = 256
_MOST = 4  # tensors that one is kept apart from
_ROOM = _MOST * (2 * _APART - _LINE)  # bytes within which there is a place apart from so many


@functools.cache
def large_page() -> int:
    """Bytes of a large page; 0 where the system has none that a process may ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


class _Chunk:
    """Memory from which pieces are cut one after another. It takes pages as they are written, and is gone with its last piece."""

    def __init__(self, size: int, page: int) -> None:
        self._memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._next = -self._base % page
        self._end = self._next + size
        if whole := size // page * page:  # one more would be taken whole for its first bytes
            self._memory.madvise(mmap.MADV_HUGEPAGE, self._next, whole)

    def cut(self, size: int, beside: Sequence[Tensor]) -> ctypes.Array[ctypes.c_char] | None:
        """`size` bytes of zeros, given back to the system when nobody holds them; None where they do not fit."""
        begin = self._next + _shift(self._base + self._next, beside)
        end = begin + size
        if end > self._end:
            return None
        self._next = -(-end // _LINE) * _LINE
        piece = (ctypes.c_char * size).from_buffer(self._memory, begin)
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            weakref.finalize(piece, self._memory.madvise, mmap.MADV_DONTNEED, first, last - first).atexit = False
        return piece


_chunk: _Chunk | None = None
_lock = threading.Lock()


def zeros_like(t: Tensor, dtype: torch.dtype, beside: Sequence[Tensor] = ()) -> Tensor:
    """Zeros of the shape, strides and device of `t`. On a CPU, where they are not few: apart from `beside`, tensors that are read
    with them (_MOST at most), and in large pages, where the system has them: those of torch's heap in an engine (`ops/heap.py`),
    or else such as are mapped here."""
    size = t.numel() * dtype.itemsize
    if type(t) in OF_TORCH and t.is_cpu and size >= _SMALL:
        memory = None if Heap.serves else _mapped(size, beside)
        if memory is None:
            memory = torch.empty(size + _ROOM, dtype=torch.uint8)
            memory = memory[_shift(memory.data_ptr(), beside) :][:size].zero_()
        strides = torch.empty_like(t, dtype=dtype, device="meta", memory_format=torch.preserve_format).stride()
        first = memory.storage_offset() // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), first, t.shape, strides)
    return torch.zeros_like(t, dtype=dtype, memory_format=torch.preserve_format)


def _mapped(size: int, beside: Sequence[Tensor]) -> Tensor | None:
    """So many bytes of zeros in large pages; None where the system has none, or no more."""
    global _chunk
    if not (page := large_page()):
        return None
    try:
        if size > _CHUNK // 2:
            piece = _Chunk(size + _ROOM, page).cut(size, beside)
        else:
            with _lock:
                piece = None if _chunk is None else _chunk.cut(size, beside)
                if piece is None:
                    _chunk = _Chunk(_CHUNK + _PIECES * _ROOM, page)
                    piece = _chunk.cut(size, beside)
    except OSError:  # a limit of the process; torch's allocator has more to say, if it meets it too
        return None
    return None if piece is None else torch.frombuffer(piece, dtype=torch.uint8)


def _shift(address: int, beside: Sequence[Tensor]) -> int:
    """Bytes from `address` to the next place that is _APART from those of `beside`."""
    places = [t.data_ptr() for t in beside[:_MOST]]
    for shift in range(0, _ROOM, _LINE):
        if all(_APART <= (address + shift - place) % _SETS <= _SETS - _APART for place in places):
            return shift
    return 0
