"""Copies between an accelerator and page-locked memory of the host, beside the computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroengine.offload.buffers import host_bytes, pinned_bytes


def on_host(source: Tensor, pin: bool) -> Tensor:
    """A copy of a 1-D tensor in memory of the host, page-locked if so wanted and possible."""
    memory = pinned_bytes(source.nbytes) if pin else host_bytes(source.nbytes)
    return memory[: source.nbytes].view(source.dtype).copy_(source)


@dataclass
class Arriving:
    """A copy on its way to the host."""

    tensor: Tensor
    _event: Any

    def wait(self) -> Tensor:
        """The copy, when the host may read it."""
        if self._event is not None:
            self._event.synchronize()
        return self.tensor


class DeviceLink:
    """Moves flat tensors between `device` and the host on a stream of its own. On the CPU nothing is copied: a tensor is its own
    copy. Nor is there anything to copy on the meta device.

    Two staging buffers on the host, used in turn, bound its memory: a tensor from `down` is valid until the second next call.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.device = device
        self._pin = pin
        self._staging: list[Tensor | None] = [None, None]
        self._turn = 0
        self._torch: Any = torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
        self._stream: Any = self._torch.Stream(device) if self._torch is not None else None

    def down(self, source: Tensor) -> Arriving:
        """Begins to copy a tensor of the device to the host, after the work that is queued on the current stream."""
        if self._torch is None:
            return Arriving(source, None)
        target = self._room(source.nbytes)[: source.nbytes].view(source.dtype)
        self._stream.wait_stream(self._torch.current_stream(self.device))
        with self._torch.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._torch.Event()
            event.record(self._stream)
        source.record_stream(self._stream)
        return Arriving(target, event)

    def up(self, source: Tensor, target: Tensor) -> None:
        """Copies a tensor of the host into one of the device. Work that is queued on the current stream from now on sees it;
        `source` may be changed when `settle` returned."""
        if self._torch is None:
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
            return
        current = self._torch.current_stream(self.device)
        self._stream.wait_stream(current)
        with self._torch.stream(self._stream):
            target.copy_(source, non_blocking=True)
        current.wait_stream(self._stream)

    def lend(self, source: Tensor) -> Tensor:
        """`source` on the device: itself, or a copy for work that is queued on the current stream from now on."""
        if source.device == self.device:
            return source
        target = torch.empty_like(source, device=self.device)
        self.up(source, target)
        return target

    def settle(self) -> None:
        """Waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def _room(self, nbytes: int) -> Tensor:
        self._turn = 1 - self._turn
        room = self._staging[self._turn]
        if room is None or room.numel() < nbytes:
            room = self._staging[self._turn] = pinned_bytes(nbytes) if self._pin else host_bytes(nbytes)
        return room

    def bytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(t.numel() for t in self._staging if t is not None)
