"""Movement of data between processes of one host through memory that they share (csrc/shm).

Ranks meet: each announces where its peers may read, waits until all have, and reads what it needs. Two rules say when
memory may be written again.

- Memory from `empty` is read by the peers where it lies. The operation then ends with one more meeting, after which nobody
  reads it: when `Work.wait` returns on a rank, its result is there and its tensors are its own again.
- Other memory is copied into a staging area of two halves, round by round, and is free as soon as it is copied. A half is
  written again only after a meeting that every rank announces after it has read that half, so staging needs no wait of its
  own. An operation that fits into one round is one meeting, and the comparison of fingerprints rides on it.

Results do not depend on where tensors lie, and are those of `transport.Transport` bit for bit.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zeroengine.comm.arena import Arena
from zeroengine.comm.fingerprint import KINDS, SUBJECT_BYTES, Fingerprint, decode, divergence
from zeroengine.comm.lane import Operation
from zeroengine.comm.protocol import ReduceOp
from zeroengine.comm.scratch import Scratch
from zeroengine.comm.shm_native import DIVERGED, DONE, Native, integers
from zeroengine.comm.stream import Order, Stream
from zeroengine.comm.transport import FixedOrder
from zeroengine.errors import RankError

OpenPair = Callable[[int, int], int]
"""Places of sender and receiver -> handle of a native group."""

_SMALL = 128 * 1024
"""Bytes up to which staging is cheaper than the closing meeting of shared memory."""


class SharedTransport(FixedOrder):
    """Collectives of one group. Not thread-safe: one operation at a time, but `interrupt` from any thread."""

    kind = "shared memory"

    def __init__(
        self, name: str, native: Native, arena: Arena, handle: int, ranks: tuple[int, ...], rank: int, open_pair: OpenPair | None = None
    ) -> None:
        """`open_pair(src, dst)` makes the native group of two for messages; None: there is none."""
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.scratch = Scratch()
        self._native = native
        self._arena = arena
        self._handle = handle
        self._ending = threading.Lock()  # another thread may interrupt what ends
        self.stream = Stream(native, handle)
        self._subject = ""
        self._open_pair = open_pair
        self._channels: dict[tuple[int, int], Channel] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, like: Tensor) -> Tensor:
        if numel * like.element_size() <= _SMALL:
            return torch.empty(numel, dtype=like.dtype)
        return self._arena.tensor(numel, like.dtype)

    def pool_bytes(self) -> int:
        return self.scratch.bytes()

    def interrupt(self) -> None:
        """The operation under way and all later ones fail within a fraction of a second."""
        with self._ending:
            if self._handle:
                self._native.interrupt(self._handle)

    def end(self) -> None:
        """Ends the transport, and the channels. Control blocks stay: a peer may still read what this rank announced last."""
        while self._channels:
            self._channels.popitem()[1].end()
        with self._ending:
            handle, self._handle = self._handle, 0
            if handle:
                self._native.group_delete(handle)

    @property
    def carries_messages(self) -> bool:
        """There is room for channels, on all ranks alike."""
        return self._open_pair is not None

    def channel(self, src: int, dst: int) -> Channel | None:
        """For messages from place `src` to place `dst`, of which one is this rank's; None where there is no room for them, on
        all ranks alike. From the thread that will use it, or before any does."""
        if self._open_pair is None:
            return None
        made = self._channels.get((src, dst))
        if made is None:
            ends = (self.ranks[src], self.ranks[dst])
            handle, place = self._open_pair(src, dst), Channel.SENDER if src == self.rank else Channel.RECEIVER
            made = self._channels[src, dst] = Channel(self.name, self._native, self._arena, handle, ends, place)
        return made

    # -- an operation ------------------------------------------------------------------------------------------------

    def verify(self, operation: Operation) -> None:
        """Has the first meeting of the operation compare its fingerprint: `DivergenceError` on every rank when they
        differ."""
        self.announce(operation.fingerprint, operation.index)

    def announce(self, mark: Fingerprint, index: int) -> None:
        self._subject = mark.describe()
        self._native.announce(self._handle, integers(mark.header(index)), mark.text())

    def failed(self, mark: Fingerprint, *tensors: Tensor) -> None:
        """Raises the error of the operation at which the stream has stopped. `tensors`: those that it needed."""
        del tensors
        self._subject = mark.describe()
        self._done(self.stream.status)

    def finish(self) -> None:
        """Meets, if the operation has not: one without data is a barrier."""
        self._done(self._native.finish(self._handle))

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        self._run(self.stream.all_gather(full, shard))

    def reduce_scatter(self, shard: Tensor, full: Tensor, scale: float, accumulate: bool) -> None:
        order = self.stream.reduce_scatter(shard, full, scale, accumulate)
        if order is not None:
            self._run(order)
        else:
            super().reduce_scatter(shard, full, scale, accumulate)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, scale: float) -> None:
        order = self.stream.all_reduce(tensor, op, scale)
        if order is not None:
            self._run(order)
        else:
            super().all_reduce(tensor, op, scale)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self._run(self.stream.broadcast(tensor, src))

    def all_to_all(self, output: Tensor, input: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None) -> None:
        if output_splits is None or input_splits is None:
            self._run(self.stream.all_to_all(output, input, self.size))
            return
        item = output.element_size()
        sends = torch.tensor([n * item for n in input_splits], dtype=torch.int64)
        matrix = torch.empty(self.size, self.size, dtype=torch.int64)  # bytes [from, to]
        self.all_gather(matrix, sends)
        remote = matrix[:, : self.rank].sum(1).tolist()
        receives = [n * item for n in output_splits]
        self._blocks(output, input, receives, sends.tolist(), remote, int(matrix.max()))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _run(self, order: Order) -> None:
        """In this thread, as a part of the operation that was announced."""
        self._done(self._native.run(self._handle, ctypes.byref(order)))

    def _blocks(self, output: Tensor, input: Tensor, receives: list[int], sends: list[int], remote: list[int], largest: int) -> None:
        status = self._native.all_to_all(
            self._handle, output.data_ptr(), input.data_ptr(), integers(_starts(sends)), integers(sends),
            integers(_starts(receives)), integers(receives), integers(remote), input.nbytes, largest,
        )  # fmt: skip
        self._done(status)

    def exchange_rows(self, full: Tensor) -> Tensor:
        received = self.scratch.take("receive", full.numel(), full.dtype, full.device)
        self.all_to_all(received, full, None, None)
        return received.view(self.size, -1)

    def _done(self, status: int) -> None:
        if status == DIVERGED:
            raise self._divergence()
        if status != DONE:
            raise RankError(
                f"rank {self.ranks[self.rank]}: {self._subject} on communicator {self.name!r} was given up; an earlier error says why"
            )

    def _divergence(self) -> Exception:
        lines = []
        for index, rank in enumerate(self.ranks):
            header, text = (ctypes.c_int64 * Fingerprint.WIDTH)(), ctypes.create_string_buffer(SUBJECT_BYTES)
            self._native.announced(self._handle, index, header, text)
            lines.append((rank, self._decoded(index, list(header), text.raw)))
        return divergence(self.name, self.ranks[self.rank], lines)

    def _decoded(self, index: int, header: list[int], text: bytes) -> str:
        return decode(header, text)


class Channel(SharedTransport):
    """Messages from one rank to one other, in order. Both ends of a message are the same operation to the comparison."""

    SENDER, RECEIVER = range(2)

    def message(self, mark: Fingerprint, tensor: Tensor) -> Order:
        """The next message, for the stream. It is done when it was received; both ranks get a `DivergenceError` if the other end has
        another subject, size or type."""
        order = self.stream.broadcast(tensor, self.SENDER)
        order.shown = replace(mark, kind="send")
        return order

    def awaited(self) -> bool:
        """Whether a message is there to be received. While none is."""
        return bool(self._native.awaited(self._handle))

    def _decoded(self, index: int, header: list[int], text: bytes) -> str:
        kind = KINDS.index("send" if index == self.SENDER else "recv")
        return super()._decoded(index, [header[0], kind, *header[2:]], text)


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
