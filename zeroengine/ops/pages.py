"""Large pages under tensors that are read and written from end to end."""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path

from torch import Tensor


@functools.cache
def large_page() -> int:
    """Bytes of a large page; 0 where the system has none that a process may ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def in_large_pages(t: Tensor) -> Tensor:
    """`t`, which nobody has written yet, on large pages where the system gives them: an optimizer step is as fast as memory is, and
    that stops at the end of every page. Only those that lie in `t` as a whole are asked for: it takes no more memory than without."""
    size = large_page() if type(t) is Tensor and t.is_cpu else 0
    if size:
        first = -(-t.data_ptr() // size) * size
        last = (t.data_ptr() + t.nbytes) // size * size
        if first < last:  # a refusal leaves small pages
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_HUGEPAGE))
    return t
