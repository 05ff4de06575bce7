"""The communication protocol: what the mechanism asks of a group of ranks.

A `Communicator` is the *ordered* stream of collectives of one group of ranks for one purpose (gathering parameters,
reducing gradients, control). Two purposes have two communicators, so that a gather and a reduction never have to be
issued in the same relative order. Every operation carries a `subject`, the human name of what is moved (a bucket, a
parameter, "clip norm"); it is part of the operation's fingerprint, and errors name it.

Every rank of the group must issue the same operations in the same order. An implementation must detect when they do not
and raise `DivergenceError` from `Work.wait` (or from the call itself) on every rank, before anyone uses wrong data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

ReduceOp = Literal["sum", "max", "min", "product", "and", "or", "xor"]


class Work(Protocol):
    """Handle of an operation that was issued and may still run."""

    def wait(self) -> None:
        """Returns when the result may be used (on CUDA: by kernels launched on the current stream afterwards)."""
        ...

    def done(self) -> bool:
        """True when `wait` would return at once, successful or not."""
        ...


@dataclass
class Traffic:
    """Operations issued, and bytes that this rank sends, by kind of operation.

    Bytes follow the bandwidth-optimal formulas on a group of N ranks and a full tensor of M bytes: all_gather,
    reduce_scatter and all_to_all (N-1)/N * M, all_reduce twice that, broadcast (N-1)/N * M, send M.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, sent: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += sent

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()


class Communicator(Protocol):
    """Collectives over `ranks` (global ranks in group order). Tensors are contiguous and 1-D unless said otherwise."""

    name: str
    ranks: tuple[int, ...]
    rank: int  # this process' index in the group
    size: int
    traffic: Traffic

    def empty(self, numel: int, like: Tensor) -> Tensor:
        """A 1-D buffer with the dtype and device of `like`, in memory that this communicator moves best."""
        ...

    def all_gather(self, full: Tensor, shard: Tensor, subject: str) -> Work:
        """full[i*S:(i+1)*S] = shard of rank i, S = shard.numel(). `shard` may be this rank's slice of `full`."""
        ...

    def reduce_scatter(self, shard: Tensor, full: Tensor, subject: str, *, scale: float = 1.0, accumulate: bool = False) -> Work:
        """shard = scale * sum over ranks of their slice `self.rank` of `full`; added to `shard` when `accumulate`.

        The wire carries full.dtype; the sum is made in shard.dtype, in an order that is fixed by rank number and does
        not depend on where buckets are cut: neighbours first, ((r0+r1)+(r2+r3))+..., so that a two-level reduction
        over groups of 2^k neighbours gives the same bits. `full` is left unspecified afterwards unless `shard` lies in
        it; `shard` may be this rank's slice of `full`.
        """
        ...

    def all_reduce(self, tensor: Tensor, subject: str, *, op: ReduceOp = "sum", scale: float = 1.0) -> Work:
        """tensor = scale * reduction over ranks (scale for "sum" only), the same bits on every rank, order as above."""
        ...

    def broadcast(self, tensor: Tensor, src: int, subject: str) -> Work:
        """tensor = the tensor of group rank `src`."""
        ...

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        subject: str,
        *,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        """Block j of `input` goes to rank j; block i of `output` comes from rank i (equal blocks without splits)."""
        ...

    def send(self, tensor: Tensor, dst: int, subject: str) -> Work:
        """Sends to group rank `dst`, which must `recv` the same shape and dtype."""
        ...

    def recv(self, tensor: Tensor, src: int, subject: str) -> Work:
        """Receives from group rank `src`."""
        ...

    def exchange(self, values: Tensor, subject: str) -> Tensor:
        """Small CPU tensors for control: returns [size, values.numel()], row i from rank i. Blocks."""
        ...

    def barrier(self, subject: str) -> None:
        """Returns when every rank of the group has arrived."""
        ...

    def pool_bytes(self) -> int:
        """Bytes of receive buffers held between operations."""
        ...

    def close(self) -> None:
        """Frees threads and process groups. Collective."""
        ...
