"""`Communicator` over a torch process group of CPU tensors (Gloo, MPI, torch's fake backend)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zeroengine.comm import checks
from zeroengine.comm.fingerprint import Fingerprint
from zeroengine.comm.lane import Lane, Operation, Watch
from zeroengine.comm.listening import Listener, Movement, Watched, heard
from zeroengine.comm.local import Finished
from zeroengine.comm.pairwise import PairLanes
from zeroengine.comm.protocol import ReduceOp, Traffic, Work
from zeroengine.comm.shared import SharedTransport
from zeroengine.comm.stream import Order, Stream
from zeroengine.comm.transport import SimulatedTransport, Transport
from zeroengine.comm.two_level import TwoLevelTransport
from zeroengine.comm.verify import HeaderCheck
from zeroengine.comm.wire import Wire

AnyTransport = Transport | SharedTransport | TwoLevelTransport
_Ordered = Callable[[Stream], Order | None]
"""An operation in words that a stream knows; None for one that it does not."""

_CLOSE_SECONDS = 5.0
_INTERRUPT_SECONDS = 2.0


class TorchCommunicator:
    """Collectives of the ranks that `wire` connects over CPU tensors, run in order by one worker thread.

    Before an operation moves data, ranks compare its fingerprint (one small all-gather): Gloo ends the process when
    sizes differ, and mixes weights without a word when only the order does. `watch` notices ranks that never arrive.

    With `shared`, everything inside a host goes through memory that the ranks share, and the comparison rides on the first
    meeting of an operation; `wire` then carries messages between hosts, or all of them without `channels`. Closing the
    communicator ends the wire. With `simulate` (torch's `fake` backend) operations run at once in the caller, without threads
    and checks, and tensors of the meta device are counted only.
    """

    def __init__(
        self,
        name: str,
        wire: Wire,
        ranks: Sequence[int],
        watch: Watch | None,
        *,
        simulate: bool = False,
        shared: SharedTransport | TwoLevelTransport | None = None,
        channels: bool = True,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = wire.rank
        self.size = len(self.ranks)
        self.traffic = Traffic()
        self.listeners: tuple[Listener, ...] = ()
        self.stuck = False  # closed, but a thread is still inside an operation that nothing can end
        self._closed = False
        self.wire = wire
        self._transport: AnyTransport
        self._transport = shared or (SimulatedTransport if simulate else Transport)(wire, self.ranks, self.rank)
        self._simulates = simulate
        self._shared = shared if isinstance(shared, SharedTransport) else None
        self._lane: Lane | None = None
        self._pairs: PairLanes | None = None
        if watch is not None:
            peers = tuple(r for r in self.ranks if r != self.ranks[self.rank])
            check = shared or HeaderCheck(name, wire, self.ranks, self.rank)
            self._lane = Lane(name, peers, watch, check.verify, self._transport.interrupt, self._shared.stream if self._shared else None)
            self._pairs = PairLanes(name, wire, self.ranks, self.rank, watch, shared if channels else None)

    def empty(self, numel: int, like: Tensor) -> Tensor:
        return self._transport.empty(numel, like)

    @property
    def moves_over(self) -> str:
        """What carries the collectives: "Gloo", "shared memory", or one inside a host and the other between."""
        return self._transport.kind

    @property
    def sent_between_hosts(self) -> int:
        """Bytes that this rank has sent to other hosts, as far as collectives of two levels did."""
        return getattr(self._transport, "sent_between_hosts", 0)

    def all_gather(self, full: Tensor, shard: Tensor, subject: str) -> Work:
        checks.check_gather(self.name, self.size, full, shard, subject)
        mark = Fingerprint("all_gather", subject, full.numel(), full.dtype)
        run, order = partial(self._transport.all_gather, full, shard), partial(Stream.all_gather, full=full, shard=shard)
        return self._issue(mark, self._share(full.nbytes), run, full, shard, order=order)

    def reduce_scatter(self, shard: Tensor, full: Tensor, subject: str, *, scale: float = 1.0, accumulate: bool = False) -> Work:
        checks.check_reduce_scatter(self.name, self.size, shard, full, scale, subject)
        mark = Fingerprint("reduce_scatter", subject, full.numel(), full.dtype, f"scale {scale:g}" if scale != 1 else "")
        run = partial(self._transport.reduce_scatter, shard, full, scale, accumulate)
        order = partial(Stream.reduce_scatter, shard=shard, full=full, scale=scale, accumulate=accumulate)
        return self._issue(mark, self._share(full.nbytes), run, full, shard, order=order)

    def all_reduce(self, tensor: Tensor, subject: str, *, op: ReduceOp = "sum", scale: float = 1.0) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.check_scale(self.name, tensor, scale, subject, op)
        detail = op if scale == 1 else f"{op}, scale {scale:g}"
        mark = Fingerprint("all_reduce", subject, tensor.numel(), tensor.dtype, detail)
        sent = checks.all_reduce_share(tensor, self.size)
        run, order = partial(self._transport.all_reduce, tensor, op, scale), partial(Stream.all_reduce, tensor=tensor, op=op, scale=scale)
        return self._issue(mark, sent, run, tensor, order=order)

    def broadcast(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.require(0 <= src < self.size, f"source {src} of a group of {self.size}", self.name, subject)
        mark = Fingerprint("broadcast", subject, tensor.numel(), tensor.dtype, f"from rank {self.ranks[src]}")
        run, order = partial(self._transport.broadcast, tensor, src), partial(Stream.broadcast, tensor=tensor, src=src)
        return self._issue(mark, self._share(tensor.nbytes), run, tensor, order=order)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        subject: str,
        *,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        checks.check_all_to_all(self.name, self.size, output, input, subject, output_splits, input_splits)
        sent = checks.all_to_all_share(input, input_splits, self.rank, self.size)
        order: _Ordered | None = None
        if input_splits is None or output_splits is None:
            mark = Fingerprint("all_to_all", subject, input.numel(), input.dtype)
            run = partial(self._transport.all_to_all, output, input, None, None)
            order = partial(Stream.all_to_all, output=output, input=input, size=self.size)
        else:
            sends, receives = tuple(input_splits), tuple(output_splits)
            mark = Fingerprint("all_to_all", subject, 0, input.dtype, "uneven blocks")
            run = partial(self._uneven, output, input, receives, sends, mark)
        return self._issue(mark, sent, run, output, input, order=order)

    def send(self, tensor: Tensor, dst: int, subject: str) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.check_peer(self.name, self.size, self.rank, dst, subject)
        self.traffic.count("send", tensor.nbytes)
        self._check_usable(subject, tensor)
        return self._watched(self._pairs.send(tensor, dst, subject), "send", subject, tensor.nbytes) if self._pairs else Finished()

    def recv(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.check_peer(self.name, self.size, self.rank, src, subject)
        self.traffic.count("recv", 0)
        self._check_usable(subject, tensor)
        return self._watched(self._pairs.recv(tensor, src, subject), "recv", subject, 0) if self._pairs else Finished()

    def exchange(self, values: Tensor, subject: str) -> Tensor:
        values = values.detach().contiguous().view(-1)
        out = torch.empty(self.size, values.numel(), dtype=values.dtype)
        mark = Fingerprint("exchange", subject, values.numel(), values.dtype)
        sent = checks.exchange_share(values, self.size)
        run, order = partial(self._transport.all_gather, out, values), partial(Stream.all_gather, full=out, shard=values)
        self._issue(mark, sent, run, out, values, order=order).wait()
        return out

    def barrier(self, subject: str) -> None:
        # the comparison of fingerprints, or the meeting that ends an operation without data, is itself a barrier
        self._issue(Fingerprint("barrier", subject, 0, torch.uint8), 0, _nothing, order=Stream.barrier).wait()

    def run(self, mark: Fingerprint, sent: int, move: Callable[[AnyTransport], None]) -> Operation:
        """An operation of the caller's own in the order of the others: `move` moves data by the transport it is given, in the thread
        of the communicator. Every rank must say the same `mark`. Not for simulated groups."""
        if self._lane is None or self._closed:
            raise RuntimeError(f"communicator {self.name!r} is closed or simulated ({mark.subject})")
        self.traffic.count(mark.kind, sent)
        return self._lane.submit(mark, partial(self._complete, partial(move, self._transport)))

    @property
    def messages(self) -> PairLanes:
        """Sends and receives, with tags."""
        if self._pairs is None:
            raise RuntimeError(f"communicator {self.name!r} is closed or simulated")
        return self._pairs

    def interrupt(self, error: Exception) -> None:
        """What runs and all that follows fails with `error`."""
        for lane in (self._lane, *(self._pairs.lanes() if self._pairs is not None else ())):
            if lane is not None:
                lane.poison(error)

    def pool_bytes(self) -> int:
        """Bytes of receive buffers held between operations."""
        return self._transport.pool_bytes()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lane is not None and self._pairs is not None:
            self._lane.close(_CLOSE_SECONDS)
            if self._lane.running():  # its peers do not come
                self._transport.interrupt()
                self._lane.close(_INTERRUPT_SECONDS)
            self._pairs.close(_CLOSE_SECONDS, _INTERRUPT_SECONDS)
            self.stuck = self._lane.running() or self._pairs.running()
        self._transport.scratch.clear()
        if not self.stuck:  # a thread that still uses the group keeps it
            # The last reference goes here: Gloo's threads and sockets end now and in this thread, not when and where the
            # garbage collector comes upon an engine that was destroyed.
            self._pairs = None
            self._transport.end()
            self.wire.close()

    def _issue(self, mark: Fingerprint, sent: int, run: Callable[[], None], *tensors: Tensor, order: _Ordered | None = None) -> Work:
        """`order`: the same as `run`, for the stream."""
        self._check_usable(mark.subject, *tensors)
        self.traffic.count(mark.kind, sent)
        if any(t.is_meta for t in tensors):
            run, order = _nothing, None
        made = order(self._shared.stream) if self._shared is not None and order is not None else None
        listeners = self.listeners
        if not listeners:
            return self._start(mark, run, tensors, made)
        movement = Movement(self, mark.kind, mark.subject, sent)
        if made is None or any(listener.hears_runs for listener in listeners):
            return Watched(self._start(mark, heard(run, movement, listeners), tensors), movement, listeners)
        return _TimedByStream(self._start(mark, run, tensors, made), movement, listeners)

    def _watched(self, work: Work, kind: str, subject: str, sent: int) -> Work:
        return Watched(work, Movement(self, kind, subject, sent), self.listeners) if self.listeners else work

    def _start(self, mark: Fingerprint, run: Callable[[], None], tensors: Sequence[Tensor], order: Order | None = None) -> Work:
        if self._lane is not None and self._shared is not None and order is not None:
            return self._lane.submit(mark, partial(self._shared.failed, mark, *tensors), order)
        if self._lane is not None:
            return self._lane.submit(mark, partial(self._complete, run))
        with torch.inference_mode():
            run()
        return Finished()

    def _complete(self, run: Callable[[], None]) -> None:
        run()
        self._transport.finish()

    def _uneven(self, output: Tensor, input: Tensor, receives: tuple[int, ...], sends: tuple[int, ...], mark: Fingerprint) -> None:
        if self._lane is not None:
            HeaderCheck.verify_splits(self._transport, self.name, receives, sends, mark)
        self._transport.all_to_all(output, input, receives, sends)

    def _check_usable(self, subject: str, *tensors: Tensor) -> None:
        if self._closed:
            raise RuntimeError(f"communicator {self.name!r} is closed ({subject})")
        for t in tensors:
            usable = t.device.type == "cpu" or (self._simulates and t.is_meta)
            checks.require(usable, f"a CPU communicator was given a {t.device} tensor", self.name, subject)

    def _share(self, nbytes: int) -> int:
        return checks.sent_share(nbytes, self.size)


class _TimedByStream(Watched):
    def _finish(self, work: Work, movement: Movement) -> None:
        work.wait()
        span = work.span() if isinstance(work, Operation) else None
        if span is not None:
            movement.began, movement.ended = span


def _nothing() -> None:
    return
