"""A bounded number of host buffers that data passes through on its way from and to a disk."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from zeroengine.logging import log_once
from zeroengine.wording import first_line

PAGE = 4096  # alignment of addresses, offsets and sizes that direct file access wants

Allocate = Callable[[int], Tensor]
"""uint8 memory on the host of so many bytes."""


def rounded(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def padded(nbytes: int) -> int:
    """What a tensor takes in a record: up to whole cache lines."""
    return -(-nbytes // 64) * 64


def host_bytes(nbytes: int) -> Tensor:
    """Pages of their own, which go back to the system with the tensor, and are there once they are written."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, PAGE)), dtype=torch.uint8)


def disk_bytes(nbytes: int) -> Tensor:
    """Pages of their own that a disk reads into and is written from: large ones where the system has them, because a direct transfer
    looks up every page (reads are twice as fast). A forked child does not have them: a fork would give one of both another copy of a
    page, and the disk might write into that of the other."""
    pages = private_pages(nbytes)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)


def private_pages(nbytes: int) -> mmap.mmap:
    """Pages of this process only, large ones where the system has them: what is slow in new memory is that each page is cleared
    and mapped when it is first touched."""
    private = getattr(mmap, "MAP_PRIVATE", None)
    if private is None:
        return mmap.mmap(-1, max(nbytes, PAGE))
    pages = mmap.mmap(-1, max(nbytes, PAGE), flags=private | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def pinned_bytes(nbytes: int) -> Tensor:
    """Page-locked memory, from which an accelerator reads by itself; ordinary, of a page at least, where the system refuses it."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log_once(f"pin_memory: the host gives no page-locked memory ({first_line(error)}); copies are slower without")
        return host_bytes(nbytes)


class Buffers:
    """At most `count` buffers, made when they are needed; a loan beyond them is memory of its own, which ends with it."""

    def __init__(self, count: int, allocate: Allocate) -> None:
        self.count = max(count, 1)
        self._allocate = allocate
        self._size = 0
        self._free: list[Tensor] = []
        self._made = 0
        self._bytes = 0

    def reserve(self, nbytes: int, count: int) -> None:
        """Buffers will have `nbytes` at least, and not more than `count` are needed. Makes them all."""
        self._size = max(self._size, rounded(nbytes))
        self.count = min(self.count, max(count, 1))
        if self._made == len(self._free):  # none is lent
            self.clear()
            self._free = [self._aligned(self._size) for _ in range(self.count)]

    def available(self) -> bool:
        """`take` would not go beyond the bound."""
        return bool(self._free) or self._made < self.count

    def take(self, nbytes: int) -> Tensor:
        """uint8, page-aligned, `nbytes` rounded up to pages or more."""
        self._size = max(self._size, rounded(nbytes))
        if self._free:
            buffer = self._free.pop()
            if buffer.numel() >= nbytes:
                return buffer
            self._forget(buffer)
        return self._aligned(self._size)

    def give(self, buffer: Tensor) -> None:
        if self._made > self.count:
            self._forget(buffer)
        else:
            self._free.append(buffer)

    def bytes(self) -> int:
        """Bytes of all buffers that exist."""
        return self._bytes

    def clear(self) -> None:
        while self._free:
            self._forget(self._free.pop())

    def _forget(self, buffer: Tensor) -> None:
        self._made -= 1
        self._bytes -= buffer.numel()

    def _aligned(self, nbytes: int) -> Tensor:
        self._made += 1
        self._bytes += nbytes
        with torch.inference_mode(False):  # it may be made during evaluation and used in training
            memory = self._allocate(nbytes)
            if memory.data_ptr() % PAGE:
                memory = self._allocate(nbytes + PAGE)
                memory = memory[-memory.data_ptr() % PAGE :]
            return memory[:nbytes]
