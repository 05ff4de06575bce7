"""Large pages under tensors that are read and written from end to end: an optimizer step is as fast as memory is, and that stops
at the end of every page."""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroengine.ops.heap import Heap

_SMALL = 1 << 16  # bytes below which a tensor is torch's: few of them, or none of them matters
_CHUNK = 32 << 20
_LINE = 64


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
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._next = -address % page
        self._end = self._next + size
        if whole := size // page * page:  # one more would be taken whole for its first bytes
            self._memory.madvise(mmap.MADV_HUGEPAGE, self._next, whole)

    def cut(self, size: int) -> ctypes.Array[ctypes.c_char] | None:
        """`size` bytes of zeros, given back to the system when nobody holds them; None where they do not fit."""
        begin, end = self._next, self._next + size
        if end > self._end:
            return None
        self._next = -(-end // _LINE) * _LINE
        kind: Any = type("Piece", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": size})
        piece: ctypes.Array[ctypes.c_char] = kind.from_buffer(self._memory, begin)
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            weakref.finalize(piece, self._memory.madvise, mmap.MADV_DONTNEED, first, last - first).atexit = False
        return piece


_chunk: _Chunk | None = None
_lock = threading.Lock()


def zeros_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the shape, strides and device of `t`; on a CPU in large pages, where the system has them: those of torch's heap in
    an engine (`ops/heap.py`), or else such as are mapped here."""
    size = t.numel() * dtype.itemsize
    mapped = type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu and size >= _SMALL and not Heap.serves
    if mapped and (page := large_page()):
        try:
            piece = _cut(size, page)
        except OSError:  # a limit of the process; torch's allocator has more to say, if it meets it too
            piece = None
        if piece is not None:
            memory = torch.frombuffer(piece, dtype=dtype).untyped_storage()
            strides = torch.empty_like(t, dtype=dtype, device="meta", memory_format=torch.preserve_format).stride()
            return torch.empty(0, dtype=dtype).set_(memory, 0, t.shape, strides)
    return torch.zeros_like(t, dtype=dtype, memory_format=torch.preserve_format)


def _cut(size: int, page: int) -> ctypes.Array[ctypes.c_char] | None:
    global _chunk
    if size > _CHUNK // 2:
        return _Chunk(size, page).cut(size)
    with _lock:
        piece = None if _chunk is None else _chunk.cut(size)
        if piece is None:
            _chunk = _Chunk(_CHUNK, page)
            piece = _chunk.cut(size)
    return piece
