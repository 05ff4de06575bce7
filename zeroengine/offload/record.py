"""Tensors that live in a file between uses, and move there and back together."""

from __future__ import annotations

import contextlib
import enum
import mmap
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zeroengine.errors import OffloadError
from zeroengine.offload.buffers import Buffers, padded, rounded
from zeroengine.offload.home import stub
from zeroengine.ops.aio import READ, SUM, WRITE, FileIO, Transfer, TransferError, sums_for


class State(enum.Enum):
    HERE = "here"  # the tensors have their values: in memory of their own, in the buffer, or in the mapped file
    AWAY = "away"  # only the file has them
    COMING = "coming"  # a read into the buffer is under way
    GOING = "going"  # a write from the buffer is under way
    KEPT = "kept"  # the write failed: only the buffer has them


@dataclass
class Chunk:
    """Tensors that came to a record together: one range of the file. `places`: where each lies in it."""

    offset: int
    nbytes: int
    places: list[tuple[Tensor, int]]
    sums: array[int]


class RecordStore(Protocol):
    """What a record needs of the file that it lies in; see `store.DiskStore`."""

    io: FileIO
    buffers: Buffers
    read_ahead: bool
    write_behind: bool
    going: deque[Record]
    coming: list[Record]
    moved: dict[str, int]

    @property
    def fd(self) -> int: ...

    def take(self, nbytes: int) -> Tensor: ...

    def spare(self, nbytes: int) -> Tensor | None: ...

    def begin(self, action: int, memory: Tensor, offset: int, sums: array[int]) -> Transfer: ...

    def finish(self, record: Record) -> None: ...

    def check_writes(self) -> None: ...

    def extent(self, nbytes: int) -> int: ...

    def claim(self, offset: int, nbytes: int) -> None: ...

    def free(self, offset: int, nbytes: int) -> None: ...

    def error(self, what: str, subject: str, problem: int | None, at: int | None = None) -> OffloadError: ...


class Record:
    """A `Home` on a disk. `members` gives the tensors that belong to it now: it may grow (an optimizer makes state in its
    first step), and what is not given any more is forgotten."""

    in_memory = False

    def __init__(self, store: RecordStore, subject: str, members: Callable[[], Iterable[Tensor]]) -> None:
        self.subject = subject
        self.state = State.HERE
        self._store = store
        self._members = members
        self._aliases: list[tuple[Tensor, Tensor, int]] = []
        self._chunks: list[Chunk] = []
        self._buffer: Tensor | None = None
        self._transfers: list[tuple[Transfer, Chunk]] = []
        self._uses = 0
        self._changed = False
        self._mapped = False

    @property
    def stored(self) -> int:
        """Bytes of tensors in the file."""
        return sum(t.nbytes for chunk in self._chunks for t, _ in chunk.places)

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that holds the record."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def alias(self, view: Tensor, base: Tensor, offset: int) -> None:
        self._aliases.append((view, base, offset))

    def owns(self, members: Callable[[], Iterable[Tensor]]) -> None:
        self._members = members

    # --- Home -----------------------------------------------------------------------------------------------------

    def ahead(self) -> None:
        if self._store.read_ahead and self.state is State.AWAY and not self._mapped:
            buffer = self._store.spare(self.nbytes)
            if buffer is not None:
                self._start_read(buffer)

    def bring(self) -> None:
        if self.state is not State.HERE:
            if self.state is State.GOING:
                self._store.going.remove(self)
                with contextlib.suppress(OffloadError):  # the buffer has the values, and they will be written again
                    self._end_transfers("store")
                    self._changed = False
            elif self.state is State.AWAY:
                self._start_read(self._store.take(self.nbytes))
            if self.state is State.COMING:
                self._end_read()
            self.state = State.HERE
            self._point()
        self._uses += 1

    def put(self, changed: bool) -> None:
        self._changed |= changed
        self._uses -= 1
        if self._uses:
            return
        if self._mapped:
            self._take_in()
            return
        if self._changed or not self._chunks:
            self._take_in()
            if not self._chunks:  # nothing belongs to it yet
                return
            self._hide()
            self._start_write()
            if not self._store.write_behind:
                self._store.finish(self)
                self._store.check_writes()
        else:
            self._hide()
            self._give_back()

    def drop(self) -> None:
        if self.state is State.COMING:
            self._store.coming.remove(self)
            with contextlib.suppress(OffloadError):
                self._end_transfers("read back")
            self._give_back()

    # --- transfers ------------------------------------------------------------------------------------------------

    def _start_read(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._transfers = [(self._store.begin(READ, memory, chunk.offset, chunk.sums), chunk) for chunk, memory in self._in(buffer)]
        self._store.moved["read"] += self.nbytes
        self._store.coming.append(self)
        self.state = State.COMING

    def _end_read(self) -> None:
        self._store.coming.remove(self)
        try:
            self._end_transfers("read back")
        except OffloadError:
            self._give_back()
            raise

    def _start_write(self) -> None:
        buffer = self._buffer
        if buffer is None:
            raise RuntimeError(f"record {self.subject} has no buffer to write from")
        self._transfers = [(self._store.begin(WRITE, memory, chunk.offset, chunk.sums), chunk) for chunk, memory in self._in(buffer)]
        self._store.moved["written"] += self.nbytes
        self._store.going.append(self)
        self.state = State.GOING

    def over(self) -> bool:
        """What is under way has ended."""
        return all(transfer.done() for transfer, _ in self._transfers)

    def written(self) -> None:
        """Waits for the write under way, and gives the buffer back. Raises OffloadError; the buffer then keeps the values."""
        self.state = State.KEPT
        self._end_transfers("store")
        self._changed = False
        self._give_back()

    def _end_transfers(self, what: str) -> None:
        transfers, self._transfers = self._transfers, []
        failed: OffloadError | None = None
        for transfer, chunk in transfers:
            try:
                transfer.wait()
            except TransferError as error:
                failed = failed or self._store.error(what, self.subject, error.problem, chunk.offset + error.at)
        if failed is not None:
            raise failed

    def _give_back(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._store.buffers.give(buffer)
        self.state = State.AWAY

    def verify(self) -> None:
        """Reads the record to compare its checksums. Raises OffloadError."""
        if self.state is State.AWAY and self._chunks:
            self._start_read(self._store.take(self.nbytes))
            self._end_read()
            self._give_back()

    def abandon(self) -> list[tuple[int, int]]:
        """Gives up buffer and file; the tensors have no values any more. Returns the ranges (offset, bytes) of the file."""
        if self._buffer is not None:
            self._give_back()
        chunks, self._chunks = self._chunks, []
        return [(chunk.offset, chunk.nbytes) for chunk in chunks]

    def retry(self) -> None:
        """Begins the write that failed again."""
        if self.state is State.KEPT:
            self._start_write()

    # --- where tensors lie ----------------------------------------------------------------------------------------

    def _in(self, buffer: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        at = 0
        for chunk in self._chunks:
            yield chunk, buffer[at : at + chunk.nbytes]
            at += chunk.nbytes

    def _take_in(self) -> None:
        """Brings the layout up to date: tensors that are new get a place in the file, and their values one in memory."""
        members = [t for t in self._members() if t.nbytes]
        known = {id(t) for chunk in self._chunks for t, _ in chunk.places}
        here = {id(t) for t in members}
        for chunk in self._chunks:
            if any(id(t) not in here for t, _ in chunk.places):
                chunk.places = [(t, at) for t, at in chunk.places if id(t) in here]
        if not all(chunk.places for chunk in self._chunks):
            self._leave_out_empty()
        fresh = [t for t in members if id(t) not in known]
        if fresh:
            self._add(fresh)

    def _leave_out_empty(self) -> None:
        """Nothing is left of some chunks: the others move up in the buffer, as far as it has them."""
        parts = list(self._in(self._buffer)) if self._buffer is not None else [(chunk, None) for chunk in self._chunks]
        self._chunks = [chunk for chunk in self._chunks if chunk.places]
        at = 0
        for chunk, memory in parts:
            if not chunk.places:
                self._store.free(chunk.offset, chunk.nbytes)
            elif memory is not None and self._buffer is not None:
                self._buffer[at : at + chunk.nbytes].copy_(memory.clone())
                at += chunk.nbytes

    def _add(self, tensors: list[Tensor]) -> None:
        places, size = [], 0
        for t in tensors:
            places.append((t, size))
            size += padded(t.nbytes)
        size = rounded(size)
        before = self.nbytes
        chunk = Chunk(self._store.extent(size), size, places, sums_for(size, self._store.io.block))
        memory = self._map_chunk(chunk, new=True) if self._mapped else self._room(before, size)
        self._chunks.append(chunk)
        for t, at in places:
            memory[at : at + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        if self._mapped:
            self._point_chunk(chunk, memory)
            self._point_aliases()

    def _room(self, before: int, more: int) -> Tensor:
        """Memory for `more` bytes after the `before` that are in the buffer."""
        old = buffer = self._buffer
        if buffer is None or buffer.numel() < before + more:
            self._buffer = buffer = self._store.take(before + more)
            if old is not None:
                buffer[:before].copy_(old[:before])
                self._store.buffers.give(old)
        return buffer[before : before + more]

    def _point(self) -> None:
        buffer = self._buffer
        if buffer is None:
            return
        for chunk, memory in self._in(buffer):
            self._point_chunk(chunk, memory)
        self._point_aliases()

    def _point_chunk(self, chunk: Chunk, memory: Tensor) -> None:
        with torch.inference_mode(False):
            for t, at in chunk.places:
                t.data = memory[at : at + t.nbytes].view(t.dtype).view(t.shape)

    def _point_aliases(self) -> None:
        with torch.inference_mode(False):
            for view, base, offset in self._aliases:
                first = offset // base.element_size()
                view.data = base.data.view(-1)[first : first + view.numel()].view(view.shape)

    def _hide(self) -> None:
        with torch.inference_mode(False):
            for chunk in self._chunks:
                for t, _ in chunk.places:
                    t.data = stub(t.shape, t.dtype, t.device)
            for view, _, _ in self._aliases:
                view.data = stub(view.shape, view.dtype, view.device)

    # --- the mapped file ------------------------------------------------------------------------------------------

    def map(self) -> None:
        """Makes the tensors views of the file."""
        self._mapped = True
        if self.state is State.AWAY:
            for chunk in self._chunks:
                self._point_chunk(chunk, self._map_chunk(chunk, new=False))
            self._point_aliases()
            self.state = State.HERE

    def _map_chunk(self, chunk: Chunk, new: bool) -> Tensor:
        if new:
            self._store.claim(chunk.offset, chunk.nbytes)
        try:
            pages = mmap.mmap(self._store.fd, chunk.nbytes, flags=mmap.MAP_SHARED, offset=chunk.offset)
        except (OSError, ValueError) as error:
            code = error.errno if isinstance(error, OSError) else None
            raise self._store.error("map", self.subject, code, chunk.offset) from error
        with torch.inference_mode(False):
            return torch.frombuffer(pages, dtype=torch.uint8)

    def unmap(self, changed: bool) -> None:
        """Takes the tensors out of reach again; with `changed` what was written into the file is summed."""
        if not self._mapped:
            return
        self._mapped = False
        if self._buffer is not None or not self._chunks or self.state is not State.HERE:
            return  # it was in memory
        self._hide()
        self.state = State.AWAY
        if changed:
            self._sum_up()

    def _sum_up(self) -> None:
        self._buffer = buffer = self._store.take(self.nbytes)
        self._transfers = [(self._store.begin(SUM, memory, chunk.offset, chunk.sums), chunk) for chunk, memory in self._in(buffer)]
        try:
            self._end_transfers("read back")
        finally:
            self._give_back()
