"""New files that are only appended to: summed, written in large aligned blocks beside what makes the bytes, synced once."""

from __future__ import annotations

import os
from array import array
from collections import deque
from io import FileIO
from pathlib import Path
from types import TracebackType

import torch

from zeroengine.offload.buffers import PAGE, private_pages, rounded
from zeroengine.ops import aio
from zeroengine.ops.aio import NOT_OFFERED, TransferError, sums_for

BLOCK = 2 << 20  # bytes of one write
_BLOCKS = 4  # of memory for a save: one is filled while the others are written
_THREADS = 2


class Block:
    """Page-aligned memory that collects `BLOCK` bytes of a file."""

    def __init__(self) -> None:
        pages = private_pages(BLOCK)
        self.view = memoryview(pages)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self.sums: array[int] = sums_for(BLOCK, BLOCK)


class BlockWriter:
    """The threads that write, and the few blocks that all files of one save pass through. One thread uses it at a time."""

    def __init__(self) -> None:
        self._io: aio.FileIO | None = None
        self._free: list[Block] = []
        self._made = 0

    def io(self) -> aio.FileIO:
        if self._io is None:
            self._io = aio.file_io(_THREADS, BLOCK)
        return self._io

    def spare(self) -> Block | None:
        """A block that nobody uses, if there is one."""
        if self._free:
            return self._free.pop()
        if self._made < _BLOCKS:
            self._made += 1
            return Block()
        return None

    def give(self, block: Block) -> None:
        self._free.append(block)

    def close(self) -> None:
        """Ends the threads and gives the memory up."""
        io, self._io = self._io, None
        self._free.clear()
        self._made = 0
        if io is not None:
            io.close()


class SummedFile:
    """Makes the file `path` and appends to it. In its context, or after `finish`, `size` and `crc` (CRC-32) are those of what
    was written, and the file is durable (its folder must still be synced).

    Writes go past the page cache where the file system allows: a save then neither fills memory with pages that wait for the
    disk nor pushes out what others read. Raises OSError with the path; it is in `error` too.
    """

    def __init__(self, path: Path, writer: BlockWriter) -> None:
        self.path, self.size, self.crc = path, 0, 0
        self.error: OSError | None = None
        self._writer = writer
        self._file = self._open()
        self._block: Block | None = None
        self._filled = 0
        self._going: deque[tuple[aio.Transfer, Block, int, int]] = deque()  # transfer, block, offset in the file, bytes

    def _open(self) -> FileIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        try:
            fd = os.open(self.path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise
            fd = os.open(self.path, flags, 0o666)
        return FileIO(fd, "wb")

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._abandon()

    # --- what a writer of archives or pickles asks for ----------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> int:
        count = memoryview(data).nbytes
        rest = memoryview(data).cast("B") if count else memoryview(b"")
        while rest:
            block = self._block or self._next_block()
            part = rest[: BLOCK - self._filled]
            block.view[self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            rest = rest[part.nbytes :]
            if self._filled == BLOCK:
                self._submit()
        return count

    def tell(self) -> int:
        return self.size + self._filled

    def flush(self) -> None:
        """Nothing: blocks are written when they are full, and what is left by `finish`."""

    def close(self) -> None:
        """Nothing: `finish` ends the file."""

    # --- blocks -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Writes what is left, syncs and closes the file."""
        used = self._filled
        if used:
            self._submit()
        while self._going:
            self._end_oldest()
        with self._file:
            if used % PAGE:  # direct writes are of whole pages
                self._file.truncate(self.size)
            os.fsync(self._file.fileno())

    def _next_block(self) -> Block:
        while (block := self._writer.spare()) is None:
            self._end_oldest()
        self._block, self._filled = block, 0
        return block

    def _submit(self) -> None:
        block, used, at = self._block, self._filled, self.size
        if block is None:
            raise RuntimeError(f"{self.path}: there is no block to write")
        self.crc = aio.crc32(block.memory[:used], self.crc)
        self.size += used
        self._block, self._filled = None, 0
        nbytes = rounded(used)
        block.view[used:nbytes] = bytes(nbytes - used)
        transfer = self._writer.io().begin(aio.WRITE, self._file, block.memory[:nbytes], at, block.sums)
        self._going.append((transfer, block, at, nbytes))

    def _end_oldest(self) -> None:
        transfer, block, at, nbytes = self._going.popleft()
        try:
            transfer.wait()
        except TransferError as error:
            try:
                if error.problem not in NOT_OFFERED:
                    raise OSError(error.problem, os.strerror(error.problem), str(self.path)) from error
                self._write_plainly(block.view[:nbytes], at)
            except OSError as exc:
                self.error = self.error or exc
                raise
        finally:
            self._writer.give(block)

    def _write_plainly(self, data: memoryview, at: int) -> None:
        """Through the page cache: the file system does not write directly after all, or not so much, and then says why."""
        fd = os.open(self.path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            while data:
                done = os.pwrite(fd, data, at)
                data, at = data[done:], at + done
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, str(self.path)) from exc
        finally:
            os.close(fd)

    def _abandon(self) -> None:
        """After an error: waits for what is under way, whose memory others will use."""
        while self._going:
            transfer, block, *_ = self._going.popleft()
            try:
                transfer.wait()
            except TransferError:
                pass
            self._writer.give(block)
        if self._block is not None:
            self._writer.give(self._block)
            self._block = None
        self._file.close()
