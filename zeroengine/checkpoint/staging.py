"""Host memory that a save in the background copies to: kept from save to save, and the system's to take back in between."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zeroengine.offload.buffers import pinned_bytes, private_pages
from zeroengine.ops.aio import copy_away
from zeroengine.zero.layout import Piece

_ALIGN = 64  # bytes between staged pieces, a cache line


class StagingMemory:
    """One block of memory, as large as the largest save so far.

    What costs in a copy to fresh memory is that the system must clear and map every page first. So the block stays, in large
    pages where the system has them, and between saves its pages are marked as free: the system takes them when it is short of
    memory, and until then they are there for the next save. Page-locked memory, for pieces on an accelerator, only stays.
    """

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None
        self._block: Tensor | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return 0 if self._block is None else self._block.numel()

    def stage(
        self, tensors: Mapping[str, Sequence[Piece]], later: Callable[[str], bool]
    ) -> tuple[dict[str, list[Piece]], list[tuple[Tensor, Tensor]]]:  # fmt: skip
        """Copies of the pieces, in the block; those of the last call are overwritten. Of the keys that `later` says, as far as
        they lie in host memory, the copies are still to be made: (target, source) of each."""
        pieces = [piece for parts in tensors.values() for piece in parts]
        devices = {piece.data.device for piece in pieces if piece.data.device.type != "cpu"}
        block = self._room(sum(_padded(piece.data.nbytes) for piece in pieces), bool(devices))
        at = 0
        copies: dict[str, list[Piece]] = {}
        rest: list[tuple[Tensor, Tensor]] = []
        for key, parts in tensors.items():
            copies[key], waits = [], later(key)
            for piece in parts:
                target = block[at : at + piece.data.nbytes].view(piece.data.dtype)
                if waits and piece.data.device.type == "cpu":
                    rest.append((target, piece.data.detach()))
                else:
                    copy_away(target, piece.data.detach())
                copies[key].append(Piece(piece.name, piece.shape, piece.start, target, piece.part))
                at += _padded(piece.data.nbytes)
        for device in devices:
            torch.accelerator.synchronize(device)
        return copies, rest

    def release(self) -> None:
        """Nobody needs the copies any more."""
        if self._pages is not None and hasattr(mmap, "MADV_FREE"):
            with contextlib.suppress(OSError):  # a system without it keeps the pages
                self._pages.madvise(mmap.MADV_FREE)

    def close(self) -> None:
        """Gives the memory back."""
        self._block = self._pages = None

    def _room(self, nbytes: int, pin: bool) -> Tensor:
        if self._block is None or self._block.numel() < nbytes or self._pinned != pin:
            self.close()  # first: never two blocks
            self._pinned = pin
            if pin:
                self._block = pinned_bytes(nbytes)
            else:
                self._pages = private_pages(nbytes)
                self._block = torch.frombuffer(self._pages, dtype=torch.uint8)
        return self._block


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
