"""torch's file reader and writer, with checksums while writing and without arbitrary unpickling while reading.

The files are those of `FileSystemWriter`: the stock `FileSystemReader` reads them, and `dcp.load` needs nothing from
here.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zeroengine.checkpoint.raw import RawFile
from zeroengine.checkpoint.stream import BLOCK, BlockWriter, SummedFile
from zeroengine.errors import CheckpointError
from zeroengine.ops.aio import crc32

METADATA = ".metadata"
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)

FileSum = tuple[int, int]
"""(bytes, CRC-32) of a file."""


class SummingWriter(FileSystemWriter):
    """Writes into `folder` and knows afterwards what it wrote on this rank: `sums` by file name. Its files are durable."""

    def __init__(self, folder: Path) -> None:
        # every stream is synced where it ends, so torch need not do it
        super().__init__(folder, single_file_per_rank=True, sync_files=False, overwrite=True)
        self.fs = _SummingFileSystem()

    @property
    def sums(self) -> dict[str, FileSum]:
        return cast(_SummingFileSystem, self.fs).sums

    def close(self) -> None:
        """Gives up the threads and the memory that writing took."""
        cast(_SummingFileSystem, self.fs).blocks.close()


class _SummingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        self.blocks = BlockWriter()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with SummedFile(Path(path), self.blocks) as summed:
            try:
                yield cast(io.IOBase, summed)
            except RuntimeError as exc:
                # torch's archive writer reports a failed write as a wrong position; the disk's own words are better
                if summed.error is None:
                    raise
                raise summed.error from exc
        self.sums[Path(path).name] = (summed.size, summed.crc)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class SafeReader(FileSystemReader):
    """Reads the index of a checkpoint (a pickle) by the few classes it is made of, and once per object; of the tensors only
    what is wanted, into the memory where it is wanted (see `raw`)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index: Metadata | None = None
        self._sizes: dict[str, dict[tuple[int, ...], torch.Size]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            path = Path(self.path) / METADATA
            try:
                with path.open("rb") as file:
                    self._index = cast(Metadata, _IndexUnpickler(file).load())
                self._index.state_dict_metadata.items()
            except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as exc:
                raise CheckpointError(f"the index {path} is damaged or not of a checkpoint: {exc}") from exc
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        others: list[ReadItem] = []
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            plain = item.type is LoadItemType.TENSOR and not stored.transform_descriptors and sys.byteorder == "little"
            (by_file.setdefault(stored.relative_path, []) if plain else others).append(item)
        for name, items in by_file.items():
            with RawFile(Path(self.path) / name) as file:
                for item in sorted(items, key=lambda i: self.storage_data[i.storage_index].offset):
                    if not self._fill(file, item, planner):
                        others.append(item)
        return super().read_data(replace(plan, items=others), planner)

    def _fill(self, file: RawFile, item: ReadItem, planner: LoadPlanner) -> bool:
        """Whether the values lie in the file as plain bytes; then they are in the planner's tensor now."""
        index, stored = item.storage_index, self.storage_data[item.storage_index]
        entry = self.read_metadata().state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata) or index.offset is None:
            return False
        if index.fqn not in self._sizes:
            self._sizes[index.fqn] = {tuple(chunk.offsets): chunk.sizes for chunk in entry.chunks}
        shape, dtype = self._sizes[index.fqn][tuple(index.offset)], entry.properties.dtype
        at = file.values_at(stored.offset, stored.length, shape, dtype)
        if at is None:
            return False
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            raise CheckpointError(f"{index.fqn}: {tuple(item.lengths)} elements are read into {tuple(target.shape)}")
        file.fill(target, at, shape, item.storage_offsets, dtype)
        planner.commit_tensor(item, target)
        return True


class _IndexUnpickler(pickle.Unpickler):
    """Refuses every name that is not one of the plain data classes and types of torch's checkpoint index."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = {
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib", "PureWindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
        ("collections", "OrderedDict"),
    }
    _CLASSES = {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo",
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module in self._MODULES and name in self._CLASSES) or (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index of a checkpoint holds")


def sum_of(path: Path) -> FileSum:
    """Size and CRC-32 of a file as it is on disk."""
    size = crc = 0
    block = bytearray(BLOCK)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    with FileIO(path, "rb") as file:
        while got := file.readinto(block):
            size += got
            crc = crc32(memory[:got], crc)
    return size, crc


def write_file(path: Path, data: bytes) -> FileSum:
    """Writes a whole file durably (its folder must still be synced, see `sync_folder`) and returns its sums."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data), zlib.crc32(data)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable; a file system that cannot sync folders orders them itself."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    except OSError as exc:
        if exc.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)
