"""Reads and writes of files that go on beside the computation: a native pool of threads, or one of Python.

Both move blocks with `pread` and `pwrite` (direct, where the file was opened so) and keep a checksum of each block, which a
read compares. Checksums belong to the process that wrote them: the two implementations have different ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroengine.ops.registry import choose

READ, WRITE, SUM = range(3)
"""Actions: read and compare checksums, write and make them, read and make them."""

SHORT, DAMAGED = -1, -2
"""Beside the positive numbers of `errno`: the file ended too early; a block is not what was written."""

NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What a file system without direct access, or without a call of newer ones, answers."""


class TransferError(OSError):
    """A read or write failed. `problem`: an errno, SHORT or DAMAGED; `at`: byte of the request where the block begins."""

    def __init__(self, problem: int, at: int) -> None:
        text = {SHORT: "the file ends before the data does", DAMAGED: "the checksum is not that of what was written"}
        super().__init__(problem, text.get(problem) or os.strerror(problem))
        self.problem, self.at = problem, at


class File(Protocol):
    def fileno(self) -> int: ...


class Transfer(Protocol):
    """A request under way. It holds its memory until it is over; `wait` must be called once."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Returns when all bytes have moved. Raises TransferError."""
        ...


class FileIO(Protocol):
    """Requests on open files. `memory`: a contiguous CPU tensor of the bytes to move; `offset`: where in the file; `sums`: one
    64-bit word for each block of `block` bytes. All of them, and the file, are held until the request is over."""

    implementation: str
    block: int

    def begin(self, action: int, file: File, memory: Tensor, offset: int, sums: array[int]) -> Transfer: ...

    def close(self) -> None:
        """Ends the threads, after what was begun."""
        ...


def sums_for(nbytes: int, block: int) -> array[int]:
    """Room for the checksums of a request."""
    return array("Q", bytes(8 * max(-(-nbytes // block), 1)))


def file_io(threads: int, block: int) -> FileIO:
    """`threads`: blocks in flight at a time. `block`: bytes, a multiple of 4096."""
    dll = choose("aio", torch.device("cpu")).dll
    return PythonIO(threads, block) if dll is None else NativeIO(dll, threads, block)


def crc32(memory: Tensor, before: int = 0) -> int:
    """CRC-32 (that of zip and `zlib.crc32`) of the bytes of a contiguous CPU tensor, which follow those that `before` is of."""
    if not memory.nbytes:
        return before
    dll = choose("aio", torch.device("cpu")).dll
    if dll is not None and _bound(dll)["crc32_is_fast"]():
        return int(_bound(dll)["crc32"](before, memory.data_ptr(), memory.nbytes))
    return zlib.crc32(_bytes_of(memory), before)


def copy_away(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` of tensors of one size and type, past the caches where both are contiguous in memory of the host: for
    copies that nobody reads soon. On one thread, which leaves the interpreter to others."""
    plain = target.device.type == source.device.type == "cpu" and target.dtype is source.dtype
    dll = choose("aio", torch.device("cpu")).dll if plain and target.is_contiguous() and source.is_contiguous() else None
    if dll is None or target.nbytes != source.nbytes:
        target.copy_(source, non_blocking=True)
    else:
        _bound(dll)["copy"](target.data_ptr(), source.data_ptr(), target.nbytes)


def _bytes_of(memory: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


# --- native -----------------------------------------------------------------------------------------------------------

_I64, _INT = ctypes.c_int64, ctypes.c_int
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "new": (_I64, (_INT,)),
    "delete": (None, (_I64,)),
    "begin": (_I64, (_I64, _INT, _INT, _I64, _I64, _I64, _I64, _I64)),
    "done": (_INT, (_I64, _I64)),
    "end": (_INT, (_I64, _I64, ctypes.POINTER(_I64))),
    "crc32_is_fast": (_INT, ()),
    "crc32": (ctypes.c_uint32, (ctypes.c_uint32, _I64, _I64)),
    "copy": (None, (_I64, _I64, _I64)),
}


@cache
def _bound(dll: ctypes.CDLL) -> dict[str, ctypes._NamedFuncPointer]:
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(dll, f"ze_aio_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


class NativeIO:
    """`csrc/aio`."""

    implementation = "native"

    def __init__(self, dll: ctypes.CDLL, threads: int, block: int) -> None:
        self.block = block
        self.call = _bound(dll)
        self.pool: int = self.call["new"](threads)
        if not self.pool:
            raise OSError(errno.EAGAIN, f"the system gives no {threads} threads for file access")
        self.held: dict[int, tuple[Any, ...]] = {}  # by request: what its threads use
        self._end = weakref.finalize(self, _end_pool, self.call["delete"], self.pool, os.getpid(), self.held)

    def begin(self, action: int, file: File, memory: Tensor, offset: int, sums: array[int]) -> Transfer:
        return _NativeTransfer(self, action, file, memory, offset, sums)

    def close(self) -> None:
        self._end()


def _end_pool(delete: Callable[[int], None], pool: int, pid: int, held: dict[int, tuple[Any, ...]]) -> None:
    if os.getpid() == pid:  # a forked child has no threads to wait for
        delete(pool)
    held.clear()


class _NativeTransfer:
    def __init__(self, io: NativeIO, action: int, file: File, memory: Tensor, offset: int, sums: array[int]) -> None:
        self._io = io
        self._request: int = io.call["begin"](
            io.pool, action, file.fileno(), memory.data_ptr(), offset, memory.nbytes, io.block, sums.buffer_info()[0]
        )
        io.held[self._request] = (file, memory, sums)

    def done(self) -> bool:
        return bool(self._io.call["done"](self._io.pool, self._request))

    def wait(self) -> None:
        at = _I64(0)
        problem = self._io.call["end"](self._io.pool, self._request, ctypes.byref(at))
        del self._io.held[self._request]
        if problem:
            raise TransferError(problem, at.value)


# --- Python -----------------------------------------------------------------------------------------------------------


class PythonIO:
    """The same by a pool of Python's threads; system calls and checksums run without the interpreter's lock."""

    implementation = "twin"

    def __init__(self, threads: int, block: int) -> None:
        self.block = block
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="zeroengine aio")

    def begin(self, action: int, file: File, memory: Tensor, offset: int, sums: array[int]) -> Transfer:
        size, view = memory.nbytes, _bytes_of(memory)
        blocks = [
            self._pool.submit(_block, action, (file, memory), view[at : at + self.block], offset + at, sums, at // self.block)
            for at in range(0, size, self.block)
        ]
        return _PythonTransfer(blocks, self.block)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class _PythonTransfer:
    def __init__(self, blocks: list[Future[None]], block: int) -> None:
        self._blocks, self._block = blocks, block

    def done(self) -> bool:
        return all(b.done() for b in self._blocks)

    def wait(self) -> None:
        errors = [(i, b.exception()) for i, b in enumerate(self._blocks)]
        for i, error in errors:
            if isinstance(error, TransferError):
                raise TransferError(error.problem, i * self._block)
            if isinstance(error, OSError) and error.errno:
                raise TransferError(error.errno, i * self._block)
            if error is not None:
                raise error


def _block(action: int, held: tuple[File, Tensor], memory: memoryview, offset: int, sums: array[int], index: int) -> None:
    fd = held[0].fileno()
    if action == WRITE:
        sums[index] = zlib.crc32(memory)
    done = 0
    while done < len(memory):
        part = memory[done:]
        try:
            moved = os.pwritev(fd, [part], offset + done) if action == WRITE else os.preadv(fd, [part], offset + done)
        except OSError as error:
            # Direct transfers go on at a multiple of the sector only, so what was cut short before cannot.
            if error.errno != errno.EINVAL or not done:
                raise
            moved = 0
        if not moved:
            raise TransferError(errno.ENOSPC if action == WRITE else SHORT, 0)
        done += moved
    if action == WRITE:
        return
    found = zlib.crc32(memory)
    if action == SUM:
        sums[index] = found
    elif found != sums[index]:
        raise TransferError(DAMAGED, 0)
