"""What left its device as a whole, between phases of a program, and comes back to memory of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroengine.errors import OffloadError
from zeroengine.offload.buffers import Buffers, disk_bytes
from zeroengine.offload.folder import RankFolder
from zeroengine.offload.home import stub
from zeroengine.offload.record import Record
from zeroengine.offload.store import DiskStore
from zeroengine.ops.aio import FileIO

_BUFFERS = 3


@dataclass
class Lot:
    """Tensors that moved together; `put_back` makes what depends on them right when they are back. `kind`: as in the memory
    report."""

    subject: str
    kind: str
    tensors: list[Tensor]
    put_back: Callable[[], None]
    record: Record | None = None
    copies: list[Tensor] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class Parked:
    """`kinds` are away, on `tier`."""

    def __init__(self, kinds: frozenset[str], tier: str) -> None:
        self.kinds, self.tier = kinds, tier
        self.lots: list[Lot] = []
        self.failed: str | None = None
        self._store: DiskStore | None = None

    def open(self, folder: RankFolder, io: FileIO) -> None:
        """Makes the file of tier nvme. Raises OffloadError."""
        self._store = DiskStore(folder, "parked.bin", io, Buffers(_BUFFERS, disk_bytes))

    def add(self, lot: Lot, to_host: Callable[[Tensor], Tensor]) -> None:
        """Moves the tensors of a lot away. Raises OffloadError."""
        self.lots.append(lot)
        lot.devices = [t.device for t in lot.tensors]
        if self._store is None:
            lot.copies = [to_host(t) for t in lot.tensors]
            with torch.inference_mode(False):
                for t in lot.tensors:
                    t.data = stub(t.shape, t.dtype, t.device)
            return
        tensors = lot.tensors
        lot.record = self._store.record(lot.subject, lambda: tensors)
        lot.record.bring()
        lot.record.put(changed=True)
        self._store.check_writes()

    @property
    def total(self) -> int:
        """Bytes that are kept elsewhere."""
        return sum(lot.nbytes for lot in self.lots)

    def bring_back(self) -> None:
        """Gives all tensors memory of their own on their device again. Raises OffloadError; what is back then stays."""
        while self.lots:
            lot = self.lots[0]
            with torch.inference_mode(False):
                for t, values in zip(lot.tensors, self._values(lot), strict=True):
                    t.data = values
            lot.put_back()
            self.lots.pop(0)
        self.close()

    def close(self) -> None:
        """Gives up what is still away."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
            store.folder.remove()

    def _values(self, lot: Lot) -> list[Tensor]:
        if lot.record is None:
            return [copy.to(device, copy=True) for copy, device in zip(lot.copies, lot.devices, strict=True)]
        lot.record.bring()
        values = [t.clone() for t in lot.tensors]
        lot.record.put(changed=False)
        return values

    def error(self) -> OffloadError:
        return OffloadError(
            f"the states of this engine ({', '.join(sorted(self.kinds))}) were moved to {self.tier} by engine.offload_states(); call "
            "engine.reload_states() before the next use"
        )
