"""Reuse of large host buffers. The CPU allocator maps and unmaps big blocks, which costs a page fault every 4 KiB; on
accelerators torch's caching allocator does this work and the pool stands aside."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator


def storage_users(tensor: Tensor) -> int:
    """How many tensors or storages, in Python or in the autograd graph, refer to the memory of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# What `storage_users` answers for a tensor nobody else refers to (the accessor itself counts).
_ALONE = storage_users(torch.empty(1))


class BufferPool:
    """Free 1-D buffers by (numel, dtype). A buffer is taken back only if nobody else still refers to its memory:
    a view that a user kept stays valid for as long as it lives. `source`: the communicator that reads the buffers, in
    whose memory they are made; private memory without one."""

    def __init__(self, source: Communicator | None = None, keep: int = 2) -> None:
        self._source = source
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._keep = keep

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free[(numel, dtype)]
        if device.type == "cpu" and free:
            return free.pop()
        with torch.inference_mode(False):  # it may be taken during evaluation and used again in training
            if self._source is not None:
                return self._source.empty(numel, torch.empty(0, dtype=dtype, device=device))
            return torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """`buffer` must be the caller's last reference but the argument itself."""
        free = self._free[(buffer.numel(), buffer.dtype)]
        if buffer.device.type == "cpu" and len(free) < self._keep and storage_users(buffer) <= _ALONE:
            free.append(buffer)

    def bytes(self) -> int:
        """Bytes held by free buffers."""
        return sum(b.nbytes for free in self._free.values() for b in free)

    def clear(self) -> None:
        self._free.clear()
