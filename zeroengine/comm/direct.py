"""`Communicator` over a torch process group whose backend runs on the tensors' device (NCCL).

Operations go straight to the backend and are ordered on its stream: no host thread, no header and no host
synchronisation. The order of sums is the backend's. Order between ranks is checked where the host meets the others
anyway: `verify_order` compares a running hash of everything issued.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroengine.comm import checks
from zeroengine.comm.fingerprint import Fingerprint, decode_packed, divergence
from zeroengine.comm.listening import Listener, Movement, Watched
from zeroengine.comm.protocol import Communicator, ReduceOp, Traffic, Work
from zeroengine.comm.torch_names import REDUCE_OPS, all_gather_single, all_to_all_single, reduce_scatter_single
from zeroengine.device import local_device

_REMEMBERED = 64


class DirectWork:
    """Work of the backend's stream. Holds its tensors until waited for; then the current stream waits, not the host."""

    def __init__(self, handle: Any, tensors: tuple[Tensor, ...], finish: Any = None) -> None:
        self._handle = handle
        self._tensors = tensors
        self._finish = finish

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
            if self._finish is not None:
                with torch.no_grad():
                    self._finish()
        self._tensors, self._finish = (), None

    def done(self) -> bool:
        return self._handle is None or bool(self._handle.is_completed())


class _WatchedOnStream(Watched):
    """The current stream waits, and not the host: events on it tell how long."""

    def _finish(self, work: Work, movement: Movement) -> None:
        before, after = (torch.Event(enable_timing=True) for _ in range(2))
        before.record()
        work.wait()
        after.record()
        movement.marks = before, after


class OrderRecord:
    """A running hash of the operations issued, and the last few of them for the message of an error."""

    def __init__(self) -> None:
        self.issued = 0
        self._hash = 0
        self._recent: deque[tuple[int, Fingerprint]] = deque(maxlen=_REMEMBERED)

    def add(self, mark: Fingerprint) -> None:
        text = f"{self._hash} {mark.header(self.issued)}".encode()
        self._hash = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
        self._recent.append((self._hash, mark))
        self.issued += 1

    def state(self) -> Tensor:
        return torch.tensor([self.issued, self._hash], dtype=torch.int64)

    def recent(self) -> tuple[Tensor, Tensor]:
        """Hashes [64] and headers with texts [64, bytes] of the last operations, oldest first, padded with zeros."""
        hashes = torch.zeros(_REMEMBERED, dtype=torch.int64)
        rows = torch.zeros(_REMEMBERED, Fingerprint.PACKED, dtype=torch.uint8)
        start = self.issued - len(self._recent)
        for i, (value, mark) in enumerate(self._recent):
            at = (start + i) % _REMEMBERED  # by number of the operation: the same row on every rank
            hashes[at] = value
            rows[at] = mark.pack(start + i)
        return hashes, rows


class DirectCommunicator:
    """Collectives of `group` over device tensors; `wait` makes the current stream wait."""

    def __init__(self, name: str, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = dist.get_group_rank(group, dist.get_rank())
        self.size = len(self.ranks)
        self.traffic = Traffic()
        self.listeners: tuple[Listener, ...] = ()
        self.order = OrderRecord()
        self._group: dist.ProcessGroup | None = group

    def empty(self, numel: int, like: Tensor) -> Tensor:
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def all_gather(self, full: Tensor, shard: Tensor, subject: str) -> Work:
        checks.check_gather(self.name, self.size, full, shard, subject)
        told = self._note("all_gather", subject, full, checks.sent_share(full.nbytes, self.size))
        full, shard = full.view(-1), shard.view(-1)
        return self._watched(told, DirectWork(all_gather_single(full, shard, group=self._group, async_op=True), (full, shard)))

    def reduce_scatter(self, shard: Tensor, full: Tensor, subject: str, *, scale: float = 1.0, accumulate: bool = False) -> Work:
        checks.check_reduce_scatter(self.name, self.size, shard, full, scale, subject)
        sent = checks.sent_share(full.numel() * shard.element_size(), self.size)
        told = self._note("reduce_scatter", subject, full, sent)
        wide = full if full.dtype == shard.dtype else full.to(shard.dtype)  # the sum is made in the shard's dtype
        direct = not accumulate
        out = shard.view(-1) if direct else torch.empty_like(shard.view(-1))
        handle = reduce_scatter_single(out, wide.view(-1), group=self._group, async_op=True)

        def finish() -> None:
            if scale != 1.0:
                out.mul_(scale)
            if accumulate:
                shard.view(-1).add_(out)

        return self._watched(told, DirectWork(handle, (shard, full, wide, out), finish))

    def all_reduce(self, tensor: Tensor, subject: str, *, op: ReduceOp = "sum", scale: float = 1.0) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.check_scale(self.name, tensor, scale, subject, op)
        told = self._note("all_reduce", subject, tensor, checks.all_reduce_share(tensor, self.size), op)
        handle = dist.all_reduce(tensor, op=REDUCE_OPS[op], group=self._group, async_op=True)
        return self._watched(told, DirectWork(handle, (tensor,), (lambda: tensor.mul_(scale)) if scale != 1.0 else None))

    def broadcast(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.require(0 <= src < self.size, f"source {src} of a group of {self.size}", self.name, subject)
        sent = checks.sent_share(tensor.nbytes, self.size)
        told = self._note("broadcast", subject, tensor, sent, f"from rank {self.ranks[src]}")
        return self._watched(told, DirectWork(dist.broadcast(tensor, self.ranks[src], group=self._group, async_op=True), (tensor,)))

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
        uneven = input_splits is not None
        sent = checks.all_to_all_share(input, input_splits, self.rank, self.size)
        told = self._note("all_to_all", subject, input[:0] if uneven else input, sent, "uneven blocks" if uneven else "")
        receives = list(output_splits) if output_splits is not None else None
        sends = list(input_splits) if input_splits is not None else None
        handle = all_to_all_single(output, input, receives, sends, group=self._group, async_op=True)
        return self._watched(told, DirectWork(handle, (output, input)))

    def send(self, tensor: Tensor, dst: int, subject: str) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.check_peer(self.name, self.size, self.rank, dst, subject)
        told = self._told("send", subject, tensor.nbytes)
        return self._watched(told, DirectWork(dist.isend(tensor, self.ranks[dst], group=self._group), (tensor,)))

    def recv(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.check_peer(self.name, self.size, self.rank, src, subject)
        told = self._told("recv", subject, 0)
        return self._watched(told, DirectWork(dist.irecv(tensor, self.ranks[src], group=self._group), (tensor,)))

    def exchange(self, values: Tensor, subject: str) -> Tensor:
        """Rows of all ranks, on the CPU. Blocks the host; `values` travels through the device."""
        mine = values.contiguous().view(-1).to(local_device())
        rows = mine.new_empty(self.size * mine.numel())
        self._note("exchange", subject, mine, checks.exchange_share(mine, self.size))
        handle = all_gather_single(rows, mine, group=self._group, async_op=True)
        DirectWork(handle, (rows, mine)).wait()
        return rows.view(self.size, -1).cpu()

    def barrier(self, subject: str) -> None:
        raise TypeError(f"communicator {self.name!r} never blocks the host; barrier {subject!r} on a control communicator")

    def verify_order(self, control: Communicator) -> None:
        """Compares what the group's ranks have issued so far; raises `DivergenceError` on every rank of `control`.

        `control` must hold all ranks of this group. Blocks the host; moves 24 bytes a rank unless there is something to
        report."""
        place = {r: i for i, r in enumerate(control.ranks)}
        rows = [place[r] for r in self.ranks]
        states = control.exchange(self.order.state(), f"order of {self.name}")
        differs = bool((states[rows] != states[rows[0]]).any())
        anywhere = control.exchange(torch.tensor([differs]).to(torch.int64), f"order of {self.name} differs")
        if not bool(anywhere.any()):
            return
        hashes, texts = self.order.recent()
        all_hashes = control.exchange(hashes, f"history of {self.name}")[rows]
        all_texts = control.exchange(texts.view(-1), f"history of {self.name}")[rows].view(len(rows), *texts.shape)
        raise self._first_difference(all_hashes, all_texts)

    def pool_bytes(self) -> int:
        return 0

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _note(self, kind: str, subject: str, tensor: Tensor, sent: int, detail: str = "") -> Movement | None:
        self.order.add(Fingerprint(kind, subject, tensor.numel(), tensor.dtype, detail))
        return self._told(kind, subject, sent)

    def _told(self, kind: str, subject: str, sent: int) -> Movement | None:
        self.traffic.count(kind, sent)
        return Movement(self, kind, subject, sent) if self.listeners else None

    def _watched(self, movement: Movement | None, work: DirectWork) -> Work:
        return work if movement is None else _WatchedOnStream(work, movement, self.listeners)

    def _first_difference(self, hashes: Tensor, texts: Tensor) -> Exception:
        me = self.ranks[self.rank]
        # row i holds operation number n with n % 64 == i; the oldest that differs is the first divergence remembered
        numbers = texts[:, :, :8].contiguous().view(torch.int64).squeeze(-1)
        differing = (hashes != hashes[0]).any(dim=0)
        candidates = [i for i in range(hashes.shape[1]) if bool(differing[i])]
        if not candidates:
            return divergence(self.name, me, [(r, "another history, in another group") for r in self.ranks])
        first = min(candidates, key=lambda i: int(numbers[:, i].max()))
        lines = [
            (rank, decode_packed(row) if int(value) else "nothing more")
            for rank, row, value in zip(self.ranks, texts[:, first], hashes[:, first], strict=True)
        ]
        return divergence(self.name, me, lines)
