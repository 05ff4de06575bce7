"""A file of one process that holds records, and the few host buffers that they pass through."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from zeroengine.errors import OffloadError
from zeroengine.logging import log_once
from zeroengine.offload.buffers import PAGE, Buffers
from zeroengine.offload.folder import RankFolder, remedy
from zeroengine.offload.record import Record
from zeroengine.ops.aio import DAMAGED, NOT_OFFERED, SHORT, FileIO, Transfer, TransferError

_EXTENT = max(PAGE, mmap.ALLOCATIONGRANULARITY)
_BROKEN = {
    SHORT: "something cut it; keep other programs out of this folder",
    DAMAGED: "the disk or its file system gave other data than was written; check them (dmesg), or choose a folder elsewhere",
}


class DiskStore:
    """Records in `<folder>/<name>`. One thread uses it.

    Reads are begun ahead of their use and writes go on after it, as far as `buffers` allow and unless `read_ahead` or
    `write_behind` say no. What a write that failed should have stored stays in its buffer, and its error in `failed` until
    `check` or `flush` raises it.
    """

    def __init__(
        self, folder: RankFolder, name: str, io: FileIO, buffers: Buffers, *, read_ahead: bool = True, write_behind: bool = True
    ) -> None:
        self.folder = folder
        self.path = folder.path / name
        self.io = io
        self.buffers = buffers
        self.read_ahead = read_ahead
        self.write_behind = write_behind
        self.records: list[Record] = []
        self.going: deque[Record] = deque()  # writes under way, oldest first
        self.coming: list[Record] = []  # reads ahead of their use, nearest first
        self.exposing = False
        self.moved = {"read": 0, "written": 0}  # bytes, since the store was made
        self.failed: OffloadError | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets of ranges, by size
        fd, self.direct = self._open()
        self.file = os.fdopen(fd, "r+b", buffering=0)

    @property
    def fd(self) -> int:
        return self.file.fileno()

    def _open(self) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            try:
                return os.open(self.path, flags | getattr(os, "O_DIRECT", 0), 0o600), hasattr(os, "O_DIRECT")
            except OSError as error:
                if error.errno not in NOT_OFFERED:
                    raise
            log_once(f"{self.folder.base}: its file system takes no direct access, so offloaded state passes through the page cache")
            with contextlib.suppress(FileNotFoundError):  # the attempt may have made it
                self.path.unlink()
            return os.open(self.path, flags, 0o600), False
        except OSError as error:
            raise self.error("make the file for", "offloaded state", error.errno) from error

    # --- records --------------------------------------------------------------------------------------------------

    def record(self, subject: str, members: Callable[[], Iterable[Tensor]]) -> Record:
        """A record of the tensors that `members` gives; they are in memory until they are put the first time."""
        made = Record(self, subject, members)
        self.records.append(made)
        return made

    def reserve(self, largest: int, total: int) -> None:
        """`largest`: bytes of the largest record; `total`: of all. Claims that much of the disk now, so that a disk that is too
        small is found at the start; with `total` 0 when it is written."""
        self.buffers.reserve(largest, len(self.records))
        if total:
            self.claim(0, total)

    def claim(self, offset: int, nbytes: int) -> None:
        """Makes the file system set blocks aside for a range."""
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise self.error(f"set {nbytes >> 20} MiB aside for", "offloaded state", error.errno) from error

    def extent(self, nbytes: int) -> int:
        """Offset in the file of a range for `nbytes`."""
        size = -(-nbytes // _EXTENT) * _EXTENT
        if self._free.get(size):
            return self._free[size].pop()
        at = self._end
        self._end += size
        return at

    def release(self, record: Record) -> None:
        """Forgets a record; its place in the file is for the next one of the size."""
        if self.file.closed or record not in self.records:
            return
        if record in self.going:
            self.finish(record)
        record.drop()
        self.records.remove(record)
        for offset, nbytes in record.abandon():
            self.free(offset, nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """A range from `extent` is not used any more."""
        self._free.setdefault(-(-nbytes // _EXTENT) * _EXTENT, []).append(offset)

    def bytes(self) -> int:
        """Bytes of tensors in the file."""
        return sum(r.stored for r in self.records)

    # --- transfers ------------------------------------------------------------------------------------------------

    def begin(self, action: int, memory: Tensor, offset: int, sums: array[int]) -> Transfer:
        return self.io.begin(action, self.file, memory, offset, sums)

    def take(self, nbytes: int) -> Tensor:
        """A buffer: a free one, else that of the oldest write when it is over, else that of the read ahead whose use is
        farthest; when all are in use, one beyond the bound."""
        self.reap()
        while not self.buffers.available():
            if self.going:
                self.finish(self.going[0])
            elif self.coming:
                self.coming[-1].drop()
            else:
                break
        return self.buffers.take(nbytes)

    def spare(self, nbytes: int) -> Tensor | None:
        """A buffer that nobody waits for, if there is one."""
        self.reap()
        return self.buffers.take(nbytes) if self.buffers.available() else None

    def reap(self) -> None:
        """Ends the writes that are over."""
        while self.going and self.going[0].over():
            self.finish(self.going[0])

    def finish(self, record: Record) -> None:
        """Waits for the write of `record`."""
        self.going.remove(record)
        try:
            record.written()
        except OffloadError as error:
            self.failed = self.failed or error

    def flush(self) -> None:
        """Waits for all writes. Raises OffloadError for one that failed, after all are over."""
        while self.going:
            self.finish(self.going[0])
        self.check_writes()

    def check_writes(self) -> None:
        """Raises OffloadError for a write that is over and failed, once."""
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed

    def check(self) -> None:
        """Ends the writes that are over, and looks whether the file is still there. Raises OffloadError."""
        self.reap()
        self.check_writes()
        if not os.fstat(self.fd).st_nlink or not self.folder.there():
            raise self.error("find", "offloaded state", errno.ENOENT)

    def error(self, what: str, subject: str, problem: int | None, at: int | None = None) -> OffloadError:
        place = f"{self.path}" if at is None else f"{self.path}, from byte {at}"
        if problem in _BROKEN:
            cause, cure = str(TransferError(problem, 0).strerror), _BROKEN[problem]
        else:
            cause, cure = os.strerror(problem or errno.EIO), remedy(problem)
        return OffloadError(f"rank {self.folder.rank} on {socket.gethostname()}: cannot {what} {subject} ({place}): {cause}; {cure}")

    # --- everything at once ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exposed(self, write: bool) -> Iterator[None]:
        """Context in which the tensors of all records are the file itself, mapped: the system brings what is touched, and takes
        the memory back when it is short of it. Without `write` what was stored is compared with its checksums first, and must
        not be written. Nests. Raises OffloadError."""
        if self.exposing:
            yield
            return
        with contextlib.suppress(OffloadError):  # what failed is tried once more
            self.flush()
        for record in self.records:
            record.retry()
        self.flush()
        for record in list(self.coming):
            record.drop()
        if not write:
            for record in self.records:
                record.verify()
        self.exposing = True
        try:
            for record in self.records:
                record.map()
            yield
        finally:
            self.exposing = False
            self._conceal(write)

    def _conceal(self, write: bool) -> None:
        failed: OffloadError | None = None
        for record in self.records:
            try:
                record.unmap(write)
            except OffloadError as error:
                failed = failed or error
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Gives up the file and all that is in it."""
        if self.file.closed:
            return
        with contextlib.suppress(OffloadError):
            self.flush()
        for record in list(self.coming):
            record.drop()
        for record in self.records:
            record.owns(tuple)  # it is let go of by whoever it belongs to, and must not hold that in turn
        self.records.clear()
        self.buffers.clear()
        self.file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
