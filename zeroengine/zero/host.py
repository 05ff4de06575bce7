"""What goes back to the system of the host memory that is freed, and what this process keeps."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zeroengine.logging import log_once
from zeroengine.offload.buffers import host_bytes
from zeroengine.ops.heap import Heap, find_heap

_OWN_PAGES = 1 << 16  # bytes from which memory is mapped and not taken from the heap
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_CHOSEN = {
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES",  # mallopt(3)
    "THP_MEM_ALLOC_ENABLE",  # torch's allocator in large pages
}  # fmt: skip

_heap: Heap | None = None  # what torch was given


def host_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros, in pages of their own unless they are few."""
    size = numel * dtype.itemsize
    return torch.zeros(numel, dtype=dtype) if size < _OWN_PAGES else host_bytes(size).view(dtype)


class HeapTrimmer:
    """Gives free pages inside the heaps back: of C, and of large tensors. glibc keeps what lies below its top, and torch's aligned
    allocations rarely fit into a hole of their own size: a process that builds layers and cuts them would grow to the whole
    model. Where the C library has no such call, its heap stays as it is."""

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
        if _heap is not None:
            _heap.trim()


def keep_freed_memory(device: torch.device) -> None:
    """Lets this process keep what the steps free, where they compute in host memory: activations and gradients of each step, a page
    fault for every 4 KiB otherwise. What is kept is close to the peak of what the last steps needed (`step_ended`).

    Large tensors get a heap of their own (`ops/heap.py`). Where there is none, thresholds of glibc's malloc are raised: it returns
    large blocks to the system as soon as they are free. Nothing is changed where somebody has chosen: another malloc than the C
    library's, another allocator of torch, or variables of the environment.
    """
    global _heap
    if device.type != "cpu" or os.name != "posix" or _CHOSEN & os.environ.keys() or not _malloc_is_the_c_library():
        return
    heap = find_heap() if _range_is_free() else None
    if heap is not None:
        try:
            _heap = heap if heap.install() else None
        except OSError as error:
            log_once(f"the system gives no range for the memory of large tensors, which torch's allocator serves: {error.strerror}")
        else:
            return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes everywhere
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def settle() -> None:
    """After each of the first steps: gives back the holes that they leave, unless large tensors have a heap of their own. That one fills
    its holes, and its pages would be given back only to be asked for again in the next step."""
    if _heap is None:
        HeapTrimmer().trim()


def step_ended() -> None:
    """After each optimizer step: gives back what only a step of long ago, or something between steps, has needed."""
    if _heap is not None:
        _heap.step_ended()


class _Place(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def _malloc_is_the_c_library() -> bool:
    """Neither preloaded nor linked: jemalloc, tcmalloc and mimalloc have rules of their own, sanitizers watch each block."""
    loaded, place = ctypes.CDLL(None), _Place()
    if not hasattr(loaded, "posix_memalign") or not hasattr(loaded, "dladdr"):
        return False
    loaded.dladdr(ctypes.cast(loaded.posix_memalign, ctypes.c_void_p), ctypes.byref(place))
    return os.path.basename(place.file or b"").startswith((b"libc.", b"libc-"))


def _range_is_free() -> bool:
    """Addresses may be reserved that never get memory: they count neither against a limit of the process nor of the machine."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False
