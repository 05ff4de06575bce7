"""Reusable receive buffers of one communicator."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """A few named byte buffers that only grow, one for each use; operations of a communicator run one at a time, so a
    buffer is free again when its operation ends. Bounded by the largest operation."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, use: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised 1-D tensor of `numel` elements, valid until the next `take` of the same use."""
        need = numel * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < need or buffer.device != device:
            self._buffers.pop(use, None)
            del buffer  # the old one is freed before the larger one is made
            buffer = self._buffers[use] = torch.empty(need, dtype=torch.uint8, device=device)
        return buffer[:need].view(dtype)

    def bytes(self) -> int:
        return sum(b.numel() for b in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()
