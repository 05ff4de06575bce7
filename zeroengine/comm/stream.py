"""Operations of one group of ranks that share memory, in order: what csrc/shm does by itself takes no turn of the interpreter.

A thread that wakes up for each operation needs the interpreter's lock several times, while the main thread computes, and its code is
cold each time. So one thread sits in native code (`Stream.serve`) and comes back for what only Python can do.
"""

from __future__ import annotations

import ctypes
import enum
import os
import time
import weakref

from torch import Tensor

from zeroengine.comm.fingerprint import SUBJECT_BYTES, Fingerprint
from zeroengine.comm.protocol import ReduceOp
from zeroengine.comm.shm_native import DONE, TYPES, Native, made

_SLICE = 0.2  # seconds of a wait in native code, between which signals are handled


class Kind(enum.IntEnum):
    BARRIER, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, ALL_TO_ALL, FOREIGN = range(7)


class Turn(enum.IntEnum):
    FOREIGN, FAILED, CLOSED = range(3)


class Order(ctypes.Structure):
    """One operation as csrc/shm/order.h describes it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "target", "source", "count", "wire", "type", "with_")),
        ("scale", ctypes.c_double),
        ("header", ctypes.c_int64 * Fingerprint.WIDTH),
        ("text", ctypes.c_ubyte * SUBJECT_BYTES),
    ]

    shown: Fingerprint | None = None  # to the other ranks, where they know the operation by another name

    def sign(self, mark: Fingerprint, index: int) -> None:
        """What the ranks compare as they meet for it."""
        mark = self.shown or mark
        self.header[:] = mark.header(index)
        ctypes.memmove(self.text, mark.text(), SUBJECT_BYTES)


_FOREIGN = Order(Kind.FOREIGN)


class Stream:
    """The order of one group's operations. One thread calls `serve`; the others from any."""

    def __init__(self, native: Native, group: int) -> None:
        self._native = native
        self._handle = made(native.stream_new(group))
        self._pid = os.getpid()
        # with the last who may wait; it does not touch the group, which may end earlier
        weakref.finalize(self, _delete, native, self._handle, self._pid).atexit = False
        self.status = DONE  # of the operation that failed

    # -- what is native ----------------------------------------------------------------------------------------------

    def barrier(self) -> Order:
        return Order(Kind.BARRIER)

    def all_gather(self, full: Tensor, shard: Tensor) -> Order:
        return Order(Kind.ALL_GATHER, full.data_ptr(), shard.data_ptr(), shard.nbytes)

    def reduce_scatter(self, shard: Tensor, full: Tensor, scale: float, accumulate: bool) -> Order | None:
        """None for types that are not added natively."""
        wire, kind = TYPES.get(full.dtype, -1), TYPES.get(shard.dtype, -1)
        if not self._native.can_sum(wire, kind):
            return None
        return Order(
            Kind.REDUCE_SCATTER, shard.data_ptr(), full.data_ptr(), shard.numel(), wire, kind, int(accumulate), scale
        )  # fmt: skip

    def all_reduce(self, tensor: Tensor, op: ReduceOp, scale: float) -> Order | None:
        """None for what is not added natively."""
        kind = TYPES.get(tensor.dtype, -1)
        if op != "sum" or not self._native.can_sum(kind, kind):
            return None
        return Order(Kind.ALL_REDUCE, tensor.data_ptr(), 0, tensor.numel(), 0, kind, 0, scale)

    def broadcast(self, tensor: Tensor, src: int) -> Order:
        return Order(Kind.BROADCAST, tensor.data_ptr(), 0, tensor.nbytes, with_=src)

    def all_to_all(self, output: Tensor, input: Tensor, size: int) -> Order:
        """Equal blocks."""
        return Order(Kind.ALL_TO_ALL, output.data_ptr(), input.data_ptr(), input.nbytes // size)

    # -- the order ---------------------------------------------------------------------------------------------------

    def put(self, order: Order | None) -> None:
        """The next operation; None: one that comes back from `serve`."""
        if not self._native.stream_put(self._handle, ctypes.byref(_FOREIGN if order is None else order)):
            raise MemoryError("no memory for one more operation")

    def serve(self) -> Turn:
        """Does what is native, until operation number `done` is the caller's (who does it, and calls this again), one has failed with
        `status`, or the stream is closed and empty."""
        status = ctypes.c_int(DONE)
        turn = Turn(self._native.stream_serve(self._handle, ctypes.byref(status)))
        if turn is Turn.FAILED:
            self.status = status.value
        return turn

    @property
    def done(self) -> int:
        """How many operations were done."""
        return int(self._native.stream_done(self._handle))

    def wait(self, index: int, seconds: float) -> None:
        """Returns when operation `index` was done, when all were given up, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while not self._native.stream_wait(self._handle, index, max(0.0, min(_SLICE, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return

    @property
    def busy(self) -> bool:
        """A native operation runs."""
        return bool(self._native.stream_busy(self._handle))

    def span(self, index: int) -> tuple[float, float] | None:
        """When operation `index` began and ended (`time.perf_counter`); None for one of long ago."""
        times = (ctypes.c_double * 2)()
        return (times[0], times[1]) if self._native.stream_span(self._handle, index, times) else None

    def stop(self) -> None:
        """No operation begins any more, and `serve` comes back after the one that runs."""
        self._native.stream_stop(self._handle)

    def give_up(self) -> None:
        """After `stop`: who waits goes on."""
        self._native.stream_give_up(self._handle)

    def close(self) -> None:
        """After what was put, `serve` ends. Nothing in a forked child, whose copy nobody serves."""
        if os.getpid() == self._pid:
            self._native.stream_close(self._handle)


def _delete(native: Native, handle: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child its lock may be held for ever
        native.stream_delete(handle)
