"""Movement of data between several hosts that each hold several ranks: through shared memory inside a host, over Gloo between.

What leaves a host is what another host needs, once: a gather sends each shard to one rank of every other host, a reduction
sends sums over the host's ranks. The links between hosts carry ranks-per-host times fewer bytes of a reduction or gather
than without the two levels. As neighbours are summed first (`fixed_order`) and a host's ranks are 2^k neighbours, results are
those of one level to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroengine.comm.fixed_order import reduce_rows
from zeroengine.comm.lane import Operation
from zeroengine.comm.protocol import ReduceOp
from zeroengine.comm.scratch import Scratch
from zeroengine.comm.shared import Channel, SharedTransport
from zeroengine.comm.transport import SMALL_ALL_REDUCE, FixedOrder, Transport
from zeroengine.comm.verify import HeaderCheck


class TwoLevelTransport(FixedOrder):
    """Collectives of one group whose rank i is rank i % L of host i // L. Not thread-safe: one operation at a time.

    `flat` connects all ranks, `inside` those of this host, `between` those with this rank's place on every host.
    `sent_between_hosts`: bytes that this rank has sent to other hosts, headers of operations aside.
    """

    kind = "shared memory in a host, Gloo between hosts"

    def __init__(self, flat: Transport, inside: SharedTransport, between: Transport, check: HeaderCheck) -> None:
        self.ranks, self.rank, self.size = flat.ranks, flat.rank, flat.size
        self.scratch = Scratch()
        self.sent_between_hosts = 0
        self._flat = flat
        self._inside = inside
        self._between = between
        self._check = check
        self._hosts = between.size

    # -- life --------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, like: Tensor) -> Tensor:
        return self._inside.empty(numel, like)

    def pool_bytes(self) -> int:
        return sum(part.pool_bytes() for part in (self._flat, self._inside, self._between)) + self.scratch.bytes()

    def interrupt(self) -> None:
        self._inside.interrupt()

    def end(self) -> None:
        for part in (self._flat, self._inside, self._between):
            part.scratch.clear()
            part.end()
        self._between.wire.close()

    def channel(self, src: int, dst: int) -> Channel | None:
        """As of `SharedTransport`; None between hosts."""
        (host, place), (other, peer) = divmod(src, self._inside.size), divmod(dst, self._inside.size)
        return self._inside.channel(place, peer) if host == other else None

    # -- an operation ------------------------------------------------------------------------------------------------

    def verify(self, operation: Operation) -> None:
        self._check.verify(operation)
        self._inside.verify(operation)

    def finish(self) -> None:
        self._inside.finish()

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        if full.nbytes <= SMALL_ALL_REDUCE:
            self.sent_between_hosts += shard.nbytes * (self.size - self._inside.size)
            self._flat.all_gather(full, shard)
            return
        rows = self.scratch.take("rows", self._hosts * shard.numel(), shard.dtype, shard.device)
        self._between.all_gather(rows, shard)
        self.sent_between_hosts += shard.nbytes * (self._hosts - 1)
        for block, row in zip(full.view(self._hosts, -1), rows.view(self._hosts, -1), strict=True):
            self._inside.all_gather(block, row)

    def reduce_scatter(self, shard: Tensor, full: Tensor, scale: float, accumulate: bool) -> None:
        if not full.numel():
            return
        out = shard.view(-1)
        sums = self.scratch.take("sums", self._hosts * out.numel(), out.dtype, out.device)
        for row, block in zip(sums.view(self._hosts, -1), full.view(self._hosts, -1), strict=True):
            self._inside.reduce_scatter(row, block, 1.0, False)
        reduce_rows(self._rows_of_hosts(sums), "sum", out, scale=scale, accumulate=accumulate)

    def reduce_slices(self, out: Tensor, full: Tensor, op: ReduceOp, scale: float) -> None:
        if op == "sum":
            self.reduce_scatter(out, full, scale, False)
            return
        best = self.scratch.take("sums", self._hosts * out.numel(), out.dtype, out.device)
        for row, block in zip(best.view(self._hosts, -1), full.view(self._hosts, -1), strict=True):
            reduce_rows(self._inside.exchange_rows(block), op, row)
        reduce_rows(self._rows_of_hosts(best), op, out, scale=scale)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        host, place = divmod(src, self._inside.size)
        if self._inside.rank == place:
            self._between.broadcast(tensor, host)
            self.sent_between_hosts += tensor.nbytes * (self._hosts - 1) * int(self.rank == src)
        self._inside.broadcast(tensor, place)

    def all_to_all(self, output: Tensor, input: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None) -> None:
        if input_splits is not None or output_splits is not None or input.nbytes <= SMALL_ALL_REDUCE:
            self._flat.all_to_all(output, input, output_splits, input_splits)
            self._count_flat(input, input_splits)
            return
        # first to the rank of this host that has the receiver's place, then to the receiver's host
        hosts, places = self._hosts, self._inside.size
        first = self.scratch.take("first", input.numel(), input.dtype, input.device)
        second = self.scratch.take("second", input.numel(), input.dtype, input.device)
        first.view(places, hosts, -1).copy_(input.view(hosts, places, -1).transpose(0, 1))
        self._inside.all_to_all(second, first, None, None)  # [sender's place, receiver's host, elements]
        first.view(hosts, places, -1).copy_(second.view(places, hosts, -1).transpose(0, 1))
        self._between.all_to_all(output, first, None, None)
        self.sent_between_hosts += first.nbytes * (hosts - 1) // hosts

    def exchange_rows(self, full: Tensor) -> Tensor:
        received = self.scratch.take("receive", full.numel(), full.dtype, full.device)
        self.all_to_all(received, full.view(-1), None, None)
        return received.view(self.size, -1)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _rows_of_hosts(self, rows: Tensor) -> Tensor:
        """[hosts, S]: what each host has for this rank; `rows` holds what this host has for the ranks of this place."""
        self.sent_between_hosts += rows.nbytes * (self._hosts - 1) // self._hosts
        return self._between.exchange_rows(rows)

    def _count_flat(self, input: Tensor, splits: Sequence[int] | None) -> None:
        places = self._inside.size
        own = self.rank // places * places
        rows = [input.numel() // self.size] * self.size if splits is None else list(splits)
        self.sent_between_hosts += (sum(rows) - sum(rows[own : own + places])) * input.element_size()
