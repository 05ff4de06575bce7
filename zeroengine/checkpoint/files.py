"""Weight files that others read, written one tensor at a time: safetensors, and torch's own format.

Both are laid out before the first tensor is there, so tensors may come in any order and memory holds one of them. A file
appears under its name when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from zeroengine.checkpoint.storage import sync_folder
from zeroengine.errors import CheckpointError
from zeroengine.wording import listed

_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_CRC_IN_ENTRY, _CRC_IN_HEADER, _NAME_IN_ENTRY = 16, 14, 28  # byte positions in the records of a zip archive


@dataclass(frozen=True)
class Entry:
    """A tensor of a weight file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFile(Protocol):
    """One file in the making: `put` every tensor once, then `close`; `abandon` after an error."""

    def put(self, name: str, tensor: Tensor) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class _File:
    """A file under a temporary name, with the places of its tensors."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path, self.part = path, path.with_name(f".{path.name}.part")
        self._entries = {entry.name: entry for entry in entries}
        self._places: dict[str, int] = {}
        self._left = set(self._entries)

    def _open(self) -> None:
        self._file = self.part.open("r+b")

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor of the entry's shape; it is cast to the entry's dtype."""
        entry = self._entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"{self.path}: {name} has shape {tuple(tensor.shape)} and was announced with {entry.shape}")
        self._left.discard(name)
        if entry.nbytes:
            flat = tensor.detach().to(device="cpu", dtype=entry.dtype).contiguous().view(-1).view(torch.uint8)
            self._write(name, flat.numpy().data)

    def _write(self, name: str, data: memoryview) -> None:
        self._file.seek(self._places[name])
        self._file.write(data)

    def close(self) -> None:
        """Makes the file durable and gives it its name."""
        if self._left:
            raise CheckpointError(f"{self.path}: no values came for {listed(sorted(self._left))}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.part.replace(self.path)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Removes what was written."""
        if hasattr(self, "_file"):
            self._file.close()
        self.part.unlink(missing_ok=True)


class SafetensorsFile(_File):
    """https://huggingface.co/docs/safetensors: a JSON header with the place of every tensor, then their bytes."""

    def __init__(self, path: Path, entries: Sequence[Entry], other_names: Mapping[str, str]) -> None:
        """`other_names` maps names of tied tensors that are left out to names in `entries`; the header keeps them, and
        `safetensors.torch.load_model` reads them there."""
        super().__init__(path, entries)
        header: dict[str, object] = {"__metadata__": {"format": "pt", **other_names}}
        at = 0
        # Wide types first: every tensor then starts at a multiple of its element's size.
        for entry in sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name)):
            if entry.dtype not in _SAFETENSORS:
                raise CheckpointError(f"{entry.name} is {entry.dtype}, which safetensors has no name for: use --format torch")
            header[entry.name] = {
                "dtype": _SAFETENSORS[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]
            }  # fmt: skip
            self._places[entry.name] = at
            at += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._places = {name: 8 + len(text) + place for name, place in self._places.items()}
        try:
            with self.part.open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(8 + len(text) + at)
            self._open()
        except OSError:
            self.abandon()
            raise


class TorchFile(_File):
    """A state_dict as `torch.save` writes it; tied tensors have all their names and share memory when loaded."""

    def __init__(self, path: Path, entries: Sequence[Entry], other_names: Mapping[str, str]) -> None:
        """`other_names` maps further names of tied tensors to names in `entries`."""
        super().__init__(path, entries)
        with FakeTensorMode():
            state = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}
        state.update({other: state[name] for other, name in other_names.items()})
        try:
            with skip_data(materialize_fake_tensors=True):  # everything but the values, with room for them
                torch.save(state, self.part)
            reader = torch._C.PyTorchFileReader(str(self.part))
            # Storages are numbered in the order in which they are first met.
            self._records = {entry.name: f"data/{i}" for i, entry in enumerate(entries)}
            self._places = {
                name: reader.get_record_offset(record)  # type: ignore[attr-defined]
                for name, record in self._records.items()
            }
            del reader
            self._open()
        except OSError:
            self.abandon()
            raise
        self._sums: dict[str, int] = {}

    def _write(self, name: str, data: memoryview) -> None:
        super()._write(name, data)
        self._sums[self._records[name]] = zlib.crc32(data)

    def close(self) -> None:
        self._file.flush()
        self._put_checksums()
        super().close()

    def _put_checksums(self) -> None:
        """The archive was written with the checksums of empty records; other readers than torch look at them."""
        with zipfile.ZipFile(self.part) as archive:
            starts, at = {info.filename: info.header_offset for info in archive.infolist()}, archive.start_dir
        for _ in range(len(starts)):
            self._file.seek(at)
            fixed = self._file.read(46)
            length, extra, comment = struct.unpack_from("<HHH", fixed, _NAME_IN_ENTRY)
            name = self._file.read(length).decode()
            total = self._sums.get(name.partition("/")[2])
            if total is not None:
                for place in (at + _CRC_IN_ENTRY, starts[name] + _CRC_IN_HEADER):
                    self._file.seek(place)
                    self._file.write(struct.pack("<I", total))
            at += 46 + length + extra + comment
