"""Blocking movement of data over one process group of torch; the order of sums is ours (see `fixed_order`).

Reductions are an all-to-all into a receive buffer followed by local additions: the same (N-1)/N bytes as a
reduce-scatter, in a fixed order of summands, and on Gloo several times faster than its own reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.comm.fingerprint import as_bytes
from zeroengine.comm.fixed_order import reduce_rows, wide_rows
from zeroengine.comm.protocol import ReduceOp
from zeroengine.comm.scratch import Scratch
from zeroengine.comm.wire import Wire

SMALL_ALL_REDUCE = 64 * 1024
"""Bytes of all ranks' contributions up to which an all-reduce is one all-gather (latency) and not two exchanges."""


class FixedOrder:
    """Reductions made of a transport's own movements: an exchange of rows and additions here, in fixed order."""

    ranks: tuple[int, ...]
    rank: int
    size: int
    scratch: Scratch

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        raise NotImplementedError(f"{type(self).__name__} must say how it gathers")

    def exchange_rows(self, full: Tensor) -> Tensor:
        """[N, S]: row i is rank i's contribution to this rank's slice of `full`."""
        raise NotImplementedError(f"{type(self).__name__} must say how it exchanges rows")

    def reduce_scatter(self, shard: Tensor, full: Tensor, scale: float, accumulate: bool) -> None:
        if not full.numel():
            return
        rows, out = self.exchange_rows(full), shard.view(-1)
        if full.dtype != shard.dtype:
            half = self.scratch.take("wide", (self.size + 1) // 2 * out.numel(), shard.dtype, full.device)
            rows = wide_rows(rows, shard.dtype, half)
        reduce_rows(rows, "sum", out, scale=scale, accumulate=accumulate)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, scale: float) -> None:
        data = tensor.view(-1)
        if not data.numel():
            return
        if data.nbytes * self.size <= SMALL_ALL_REDUCE:
            rows = self.scratch.take("receive", self.size * data.numel(), data.dtype, data.device)
            self.all_gather(rows, data)
            reduce_rows(rows.view(self.size, -1), op, data, scale=scale)
            return
        padded, share = data, -(-data.numel() // self.size)
        if share * self.size != data.numel():
            padded = self.scratch.take("pad", share * self.size, data.dtype, data.device)
            padded[: data.numel()].copy_(data)
            padded[data.numel() :].zero_()
        own = padded[self.rank * share : (self.rank + 1) * share]
        self.reduce_slices(own, padded, op, scale)
        self.all_gather(padded, own)
        if padded is not data:
            data.copy_(padded[: data.numel()])

    def reduce_slices(self, out: Tensor, full: Tensor, op: ReduceOp, scale: float) -> None:
        """out = scale * reduction of the ranks' slices `self.rank` of `full`, of which `out` may be one."""
        reduce_rows(self.exchange_rows(full), op, out, scale=scale)


class Transport(FixedOrder):
    """Collectives of one process group. Not thread-safe: one operation at a time."""

    kind = "Gloo"

    def __init__(self, wire: Wire, ranks: tuple[int, ...], rank: int) -> None:
        self.wire = wire
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.scratch = Scratch()

    def empty(self, numel: int, like: Tensor) -> Tensor:
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def pool_bytes(self) -> int:
        return self.scratch.bytes()

    def interrupt(self) -> None:
        """Gloo has no way to give an operation up."""

    def finish(self) -> None:
        """Called after every operation."""

    def end(self) -> None:
        """Ends what is the transport's own: nothing, for the wire is its maker's."""

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        if full.numel():
            self.wire.all_gather(as_bytes(full), as_bytes(shard))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        if tensor.numel():
            self.wire.broadcast(as_bytes(tensor), src)

    def all_to_all(self, output: Tensor, input: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None) -> None:
        if output_splits is None or input_splits is None:
            if output.numel():
                self.wire.all_to_all(as_bytes(output), as_bytes(input))
            return
        item = output.element_size()
        # a rank without rows still takes part: the others' blocks for it are empty, too
        receives, sends = [n * item for n in output_splits], [n * item for n in input_splits]
        self.wire.all_to_all(as_bytes(output), as_bytes(input), receives, sends)

    def exchange_rows(self, full: Tensor) -> Tensor:
        received = self.scratch.take("receive", full.numel(), full.dtype, full.device)
        self.wire.all_to_all(as_bytes(received), as_bytes(full))
        return received.view(self.size, -1)


class SimulatedTransport(Transport):
    """Transport over torch's `fake` process group: the host's work of one rank out of many, whose peers have the same
    values as this rank.

    The fake backend fills the output of a gather with one copy a rank, which no real rank does on its host; here the
    dispatch of a collective is paid once, and one copy fills the output.
    """

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        if full.numel():
            self.wire.broadcast(as_bytes(full), self.rank)
            own = shard.reshape(1, -1)
            if full.data_ptr() <= shard.data_ptr() < full.data_ptr() + full.nbytes:
                own = own.clone()
            full.view(self.size, -1).copy_(own.expand(self.size, -1))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, scale: float) -> None:
        kept = tensor.reshape(-1).clone()
        super().all_reduce(tensor, op, scale)
        tensor.view(-1).copy_(kept * (self.size * scale) if op == "sum" else kept)
