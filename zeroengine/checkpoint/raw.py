"""Parts of saved tensors read straight into memory.

torch's reader loads a saved piece as a whole and then cuts out what is wanted: a rank that needs a quarter of an embedding
reads all of it, and holds it beside its own part. Here the place of the values inside the piece's archive is looked up, and only
the rows that are wanted are read, into the target itself where that is possible.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from zeroengine.errors import CheckpointError

_CHUNK = 16 << 20  # bytes that pass through temporary memory at a time
_HEADER = 30  # bytes of a record's own header before its name; the lengths of name and extra field are its last four


class RawFile:
    """A file of a checkpoint, open for reading ranges of the tensors in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = FileIO(path, "rb")

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def values_at(self, offset: int, length: int, shape: Sequence[int], dtype: torch.dtype) -> int | None:
        """Where in the file the values of the tensor begin that `torch.save` wrote at [offset, offset + length); None if they
        do not lie there in their order, as plain bytes of a tensor of `shape` and `dtype`."""
        part = _Part(self._file, offset, length)
        try:
            with zipfile.ZipFile(cast(IO[bytes], part)) as archive:
                records = [r for r in archive.infolist() if "/data/" in r.filename]
                head = [r for r in archive.infolist() if r.filename.endswith("/data.pkl")]
                description = archive.read(head[0]) if len(head) == 1 else b""
        except zipfile.BadZipFile:
            return None
        if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
            return None
        if records[0].file_size != math.prod(shape) * dtype.itemsize or not _in_order(description, tuple(shape)):
            return None
        at = records[0].header_offset
        part.seek(at)
        name, extra = struct.unpack("<HH", part.read(_HEADER)[-4:])
        return offset + at + _HEADER + name + extra

    def fill(self, target: Tensor, at: int, shape: Sequence[int], offsets: Sequence[int], dtype: torch.dtype) -> None:
        """Fills `target` with the box that begins at `offsets` of the row-major tensor of `shape` and `dtype` at byte `at`."""
        shape, offsets = tuple(shape), tuple(offsets)
        while len(shape) > 1 and target.shape[0] == 1:
            at += offsets[0] * math.prod(shape[1:]) * dtype.itemsize
            shape, offsets, target = shape[1:], offsets[1:], target[0]
        if not target.numel():
            return
        if not shape:
            shape, offsets, target = (1,), (0,), target.view(1)
        row = math.prod(shape[1:]) * dtype.itemsize
        at += offsets[0] * row
        whole_rows = tuple(target.shape[1:]) == shape[1:]
        if whole_rows and target.dtype is dtype and target.device.type == "cpu" and target.is_contiguous():
            self._read(target, at)
            return
        rows = max(1, min(target.shape[0], _CHUNK // row))
        block = torch.empty((rows, *shape[1:]), dtype=dtype)
        for start in range(0, target.shape[0], rows):
            count = min(rows, target.shape[0] - start)
            box = block[:count]
            self._read(box, at + start * row)
            for dim in range(1, len(shape)):
                box = box.narrow(dim, offsets[dim], target.shape[dim])
            target[start : start + count].copy_(box)

    def _read(self, target: Tensor, at: int) -> None:
        """Fills a contiguous tensor on the CPU."""
        size = target.nbytes
        memory = memoryview((ctypes.c_char * size).from_address(target.data_ptr())).cast("B")
        self._file.seek(at)
        done = 0
        while done < size:
            got = self._file.readinto(memory[done:])
            if not got:
                raise CheckpointError(f"{self._path} ends at byte {at + done}, inside a tensor")
            done += got


def _in_order(description: bytes, shape: tuple[int, ...]) -> bool:
    """Whether the description in an archive is of a tensor of this shape that fills its storage row by row."""
    try:
        offset, size, stride = _Description(io.BytesIO(description)).load()
    except (pickle.UnpicklingError, EOFError, IndexError, TypeError, ValueError, AttributeError):
        return False
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length > 1 and step != expected:
            return False
        expected *= max(length, 1)
    return bool(offset == 0) and tuple(size) == shape


class _Description(pickle.Unpickler):
    """(offset, size, stride) of a pickled tensor. It makes no object of what it reads, and refuses all but plain tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (offset, size, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


class _Part:
    """The bytes [start, start + size) of a file as a file of its own, for reading."""

    def __init__(self, file: FileIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = max(0, to + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if count < 0 else min(count, left)
        self._file.seek(self._start + self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data

    def close(self) -> Any:
        """The file stays open."""
