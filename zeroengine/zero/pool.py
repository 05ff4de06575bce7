"""Reuse of large host buffers. The CPU allocator maps and unmaps big blocks, which costs a page fault every 4 KiB; on
accelerators torch's caching allocator does this work and the pool stands aside."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.zero.host import host_memory


def storage_users(tensor: Tensor) -> int:
    """How many tensors or storages, in Python or in the autograd graph, refer to the memory of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = storage_users(torch.empty(1))  # the accessor itself counts


def is_alone(tensor: Tensor) -> bool:
    """Nobody but `tensor` refers to its memory."""
    return storage_users(tensor) <= _ALONE


class BufferPool:
    """Free 1-D buffers by capacity, for values as for gradients. A buffer is taken back only if nobody else still refers to
    its memory: a view that a user kept stays valid for as long as it lives. `source`: the communicator that reads the
    buffers, in whose memory they are made; private memory without one.

    Capacities come in steps of a quarter, so that buckets of nearly one size share buffers, and a buffer of up to twice the size
    serves as well: a model has blocks of one size and a few other buckets, which need no buffers of their own. What is beyond
    a buffer's own size is never touched: it takes memory in large pages only.
    """

    def __init__(self, source: Communicator | None = None, keep: int = 3) -> None:
        self._source = source
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # capacity in bytes: buffers of bytes
        self._keep = keep

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # it may be taken during evaluation and used again in training
            if device.type != "cpu":
                return torch.empty(numel, dtype=dtype, device=device)
            capacity = _capacity(numel * dtype.itemsize)
            fits = min((c for c, free in self._free.items() if free and capacity <= c <= 2 * capacity), default=None)
            return _over(self._make(capacity) if fits is None else self._free[fits].pop(), numel, dtype)

    def give(self, buffer: Tensor) -> None:
        """`buffer` must be the caller's last reference but the argument itself."""
        if buffer.device.type != "cpu" or not is_alone(buffer):
            return
        capacity = buffer.untyped_storage().nbytes()
        free = self._free[capacity]
        if len(free) < self._keep:
            with torch.inference_mode(False):
                free.append(_over(buffer, capacity, torch.uint8))

    def bytes(self) -> int:
        """Bytes held by free buffers, at most."""
        return sum(b.nbytes for free in self._free.values() for b in free)

    def clear(self) -> None:
        self._free.clear()

    def _make(self, nbytes: int) -> Tensor:
        if self._source is not None:
            return self._source.empty(nbytes, torch.empty(0, dtype=torch.uint8))
        return host_memory(nbytes, torch.uint8)


def unseen(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised 1-D tensor of the device's allocator. It is made by no operation: dispatch modes that count what the operations of a
    forward or backward keep do not take the engine's memory for activations."""
    made = torch.empty(0, dtype=dtype, device=device)
    storage = made.untyped_storage()
    storage.resize_(numel * dtype.itemsize)  # one that is made by itself would come from torch's default allocator on CPUs
    return made.set_(storage, 0, (numel,), (1,))


def _capacity(nbytes: int) -> int:
    """The next of 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ... units of a cache line."""
    lines = -(-nbytes // 64)
    step = 1 << max(0, lines.bit_length() - 3)
    return -(-lines // step) * step * 64


def _over(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of the memory of `buffer`. Unlike a view it does not keep `buffer` itself."""
    return torch.empty(0, dtype=dtype).set_(buffer.untyped_storage(), 0, (numel,), (1,))
