"""torch's collectives as operations of a communicator: layouts of tensors, lists of tensors, kinds of reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroengine.comm import checks
from zeroengine.comm.fingerprint import Fingerprint
from zeroengine.comm.fixed_order import reduce_rows
from zeroengine.comm.lane import Operation
from zeroengine.comm.protocol import ReduceOp
from zeroengine.comm.torch_comm import AnyTransport, TorchCommunicator
from zeroengine.comm.torch_names import REDUCE_OPS
from zeroengine.comm.verify import HeaderCheck

_SUBJECT = "torch.distributed"
_KINDS: tuple[tuple[Any, ReduceOp], ...] = (*((kind, op) for op, kind in REDUCE_OPS.items()), (dist.ReduceOp.AVG, "sum"))


@dataclass(frozen=True)
class Reduction:
    """`op`, and a factor on the result of a sum."""

    op: ReduceOp = "sum"
    scale: float = 1.0

    @classmethod
    def of(cls, opts: Any, size: int) -> Reduction:
        """`opts`: torch's options with a reduction, or torch's reduction itself; none is a sum. Raises ValueError for one that
        this backend does not know."""
        given = getattr(opts, "reduceOp", opts)
        if given is None or isinstance(given, int):  # a root, in the short form of a call
            return cls()
        found = next((op for kind, op in _KINDS if given == kind), None)
        if found is None:
            raise ValueError(f"reduction {given} is none of {', '.join(str(kind) for kind, _ in _KINDS)}")
        return cls(found, 1.0 / size if given == dist.ReduceOp.AVG else 1.0)

    def check(self, tensor: Tensor) -> None:
        if self.scale != 1.0 and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"an average of {tensor.dtype}: take the sum, or convert it to a type that holds fractions")

    def describe(self) -> str:
        return self.op if self.scale == 1.0 else f"{self.op}, scale {self.scale:g}"


class _Target:
    """Where an operation writes: `flat` is the tensor's own memory if that is contiguous."""

    def __init__(self, tensor: Tensor, filled: bool = False) -> None:
        """`filled`: the operation reads what the tensor holds."""
        tensor = tensor.detach()
        self._tensor = tensor
        self._own = tensor.is_contiguous()
        if self._own or filled:
            self.flat = tensor.contiguous().view(-1)
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype)

    def settle(self) -> None:
        if not self._own:
            self._tensor.copy_(self.flat.view(self._tensor.shape))


def flat_list(lists: Sequence[Any]) -> list[Tensor]:
    """torch hands lists over inside of lists, a historical place for several devices; short forms do not."""
    return [t for item in lists for t in (item if isinstance(item, (list, tuple)) else (item,))]


class Moves:
    """Operations of `comm`. Arguments as in torch.distributed; ranks are those of the group."""

    def __init__(self, comm: TorchCommunicator) -> None:
        self._comm = comm
        self._size = comm.size
        self._rank = comm.rank

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Operation:
        reduction.check(tensor)
        if tensor.layout is not torch.strided:
            return self._sparse_all_reduce(tensor, reduction)
        target = _Target(tensor, filled=True)

        def move(transport: AnyTransport) -> None:
            transport.all_reduce(target.flat, reduction.op, reduction.scale)
            target.settle()

        return self._run("all_reduce", target.flat, reduction.describe(), checks.all_reduce_share(tensor, self._size), move)

    def reduce(self, tensor: Tensor, root: int, reduction: Reduction) -> Operation:
        reduction.check(tensor)
        target = _Target(tensor, filled=True)
        data = target.flat if self._rank == root else target.flat.clone()  # what the others hold is theirs

        def move(transport: AnyTransport) -> None:
            transport.all_reduce(data, reduction.op, reduction.scale)
            if self._rank == root:
                target.settle()

        detail = f"{reduction.describe()}, to rank {self._comm.ranks[root]}"
        return self._run("reduce", data, detail, checks.all_reduce_share(tensor, self._size), move)

    def broadcast(self, tensor: Tensor, root: int) -> Operation:
        target = _Target(tensor, filled=self._rank == root)

        def move(transport: AnyTransport) -> None:
            transport.broadcast(target.flat, root)
            target.settle()

        return self._run("broadcast", target.flat, f"from rank {self._comm.ranks[root]}", self._share(tensor.nbytes), move)

    def all_gather(self, output: Tensor, input: Tensor) -> Operation:
        shard, target = _flat(input), _Target(output)
        checks.check_gather(self._comm.name, self._size, target.flat, shard, _SUBJECT)

        def move(transport: AnyTransport) -> None:
            transport.all_gather(target.flat, shard)
            target.settle()

        return self._run("all_gather", target.flat, "", self._share(target.flat.nbytes), move)

    def all_gather_list(self, outputs: Sequence[Tensor], input: Tensor) -> Operation:
        shard = _flat(input)
        full = torch.empty(self._size * shard.numel(), dtype=shard.dtype)
        self._check_pieces("all_gather", outputs, shard)

        def move(transport: AnyTransport) -> None:
            transport.all_gather(full, shard)
            _spread(full, outputs)

        return self._run("all_gather", full, "", self._share(full.nbytes), move)

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: Reduction) -> Operation:
        reduction.check(output)
        full, target = _flat(input), _Target(output)
        checks.check_reduce_scatter(self._comm.name, self._size, target.flat, full, 1.0, _SUBJECT)

        def move(transport: AnyTransport) -> None:
            if reduction.op == "sum":
                transport.reduce_scatter(target.flat, full, reduction.scale, False)
            elif full.numel():
                reduce_rows(transport.exchange_rows(full), reduction.op, target.flat)
            target.settle()

        return self._run("reduce_scatter", full, reduction.describe(), self._share(full.nbytes), move)

    def reduce_scatter_list(self, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Operation:
        self._check_pieces("reduce_scatter", inputs, output)
        return self.reduce_scatter(output, _joined(inputs, output), reduction)

    def gather(self, outputs: Sequence[Tensor], input: Tensor, root: int) -> Operation:
        shard, mine = _flat(input), self._rank == root
        if mine:
            self._check_pieces("gather", outputs, shard)
        full = torch.empty(self._size * shard.numel() if mine else 0, dtype=shard.dtype)
        sends = [shard.numel() if r == root else 0 for r in range(self._size)]
        receives = [shard.numel() if mine else 0] * self._size
        mark = self._mark("gather", shard, f"to rank {self._comm.ranks[root]}")

        def move(transport: AnyTransport) -> None:
            self._uneven(transport, full, shard, receives, sends, mark)
            if mine:
                _spread(full, outputs)

        return self._comm.run(mark, 0 if mine else shard.nbytes, move)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> Operation:
        target, mine = _Target(output), self._rank == root
        if mine:
            self._check_pieces("scatter", inputs, output)
        full = _joined(inputs if mine else (), output)
        count = target.flat.numel()
        sends = [count if mine else 0] * self._size
        receives = [count if r == root else 0 for r in range(self._size)]
        mark = self._mark("scatter", target.flat, f"from rank {self._comm.ranks[root]}")

        def move(transport: AnyTransport) -> None:
            self._uneven(transport, target.flat, full, receives, sends, mark)
            target.settle()

        return self._comm.run(mark, (self._size - 1) * target.flat.nbytes if mine else 0, move)

    def all_to_all(self, output: Tensor, input: Tensor, receives: Sequence[int], sends: Sequence[int]) -> Operation:
        """Splits are numbers of rows; none: equal ones."""
        target, data = _Target(output), _flat(input)
        if not receives and not sends:
            checks.check_all_to_all(self._comm.name, self._size, target.flat, data, _SUBJECT, None, None)

            def move(transport: AnyTransport) -> None:
                transport.all_to_all(target.flat, data, None, None)
                target.settle()

            return self._run("all_to_all", data, "", self._share(data.nbytes), move)
        return self._all_to_all_blocks(target, data, self._elements(output, receives), self._elements(input, sends))

    def all_to_all_list(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
        checks.require(len(outputs) == len(inputs) == self._size, "all_to_all needs one tensor for each rank", self._comm.name, _SUBJECT)
        receives, sends = [t.numel() for t in outputs], [t.numel() for t in inputs]
        data = _joined(inputs, inputs[0])
        target = _Target(torch.empty(sum(receives), dtype=outputs[0].dtype))
        return self._all_to_all_blocks(target, data, receives, sends, outputs)

    def barrier(self) -> Operation:
        return self._run("barrier", torch.empty(0, dtype=torch.uint8), "", 0, lambda transport: None)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Operation:
        self._check_message(tensor, dst)
        return self._comm.messages.send(tensor.detach(), dst, _SUBJECT, tag)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Operation:
        self._check_message(tensor, src)
        return self._comm.messages.recv(tensor.detach(), src, _SUBJECT, tag)

    def receive_from_any(self, tensor: Tensor, tag: int, told: Callable[[int], None]) -> Operation:
        checks.flat(self._comm.name, _SUBJECT, tensor)
        return self._comm.messages.recv_from_any(tensor.detach(), _SUBJECT, tag, told)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _sparse_all_reduce(self, tensor: Tensor, reduction: Reduction) -> Operation:
        """Gloo's, which knows the sum of sparse tensors only."""
        if reduction != Reduction():
            raise ValueError(f"{reduction.describe()} of a sparse tensor: only its sum can be taken")
        mark = Fingerprint("all_reduce", _SUBJECT, tensor.numel(), tensor.dtype, "sparse")
        return self._comm.run(mark, 0, lambda transport: self._comm.wire.all_reduce_sparse(tensor))

    def _all_to_all_blocks(
        self, target: _Target, data: Tensor, receives: list[int], sends: list[int], spread: Sequence[Tensor] | None = None
    ) -> Operation:
        checks.check_all_to_all(self._comm.name, self._size, target.flat, data, _SUBJECT, receives, sends)
        mark = Fingerprint("all_to_all", _SUBJECT, 0, data.dtype, "uneven blocks")

        def move(transport: AnyTransport) -> None:
            self._uneven(transport, target.flat, data, receives, sends, mark)
            target.settle()
            if spread is not None:
                _spread(target.flat, spread)

        return self._comm.run(mark, checks.all_to_all_share(data, sends, self._rank, self._size), move)

    def _uneven(
        self, transport: AnyTransport, output: Tensor, input: Tensor, receives: list[int], sends: list[int], mark: Fingerprint
    ) -> None:
        HeaderCheck.verify_splits(transport, self._comm.name, receives, sends, mark)
        transport.all_to_all(output, input, receives, sends)

    def _elements(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        if not rows:
            return [tensor.numel() // self._size] * self._size
        each = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
        return [n * each for n in rows]

    def _run(self, kind: str, tensor: Tensor, detail: str, sent: int, move: Callable[[AnyTransport], None]) -> Operation:
        return self._comm.run(self._mark(kind, tensor, detail), sent, move)

    def _mark(self, kind: str, tensor: Tensor, detail: str) -> Fingerprint:
        return Fingerprint(kind, _SUBJECT, tensor.numel(), tensor.dtype, detail)

    def _share(self, nbytes: int) -> int:
        return checks.sent_share(nbytes, self._size)

    def _check_pieces(self, kind: str, pieces: Sequence[Tensor], one: Tensor) -> None:
        fits = len(pieces) == self._size and all(p.numel() == one.numel() and p.dtype == one.dtype for p in pieces)
        sizes = [p.numel() for p in pieces]
        what = f"{kind} of {one.numel()} x {one.dtype} on each of {self._size} ranks with a list of tensors of {sizes} elements"
        checks.require(fits, what, self._comm.name, _SUBJECT)

    def _check_message(self, tensor: Tensor, peer: int) -> None:
        checks.flat(self._comm.name, _SUBJECT, tensor)
        checks.check_peer(self._comm.name, self._size, self._rank, peer, _SUBJECT)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1)


def _joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([_flat(p) for p in pieces]) if pieces else torch.empty(0, dtype=like.dtype)


def _spread(full: Tensor, pieces: Sequence[Tensor]) -> None:
    at = 0
    for piece in pieces:
        target = piece.detach()
        target.copy_(full[at : at + target.numel()].view(target.shape))
        at += target.numel()
