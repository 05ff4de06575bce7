"""The operators at the borders of a tensor-parallel region (Shoeybi et al. 2019; Korthikanti et al. 2022).

f enters it: identity forward, all-reduce backward; g leaves it: all-reduce forward, identity backward. Where the
sequence is split outside (Megatron-SP) f all-gathers and g reduce-scatters along it, and backward the other way round: the same
bytes as the all-reduces, with norms and dropout on 1/N of the tokens.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroengine.comm.protocol import Communicator


def _all_reduce(x: Tensor, comm: Communicator, subject: str) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(x, subject).wait()
    return x


def _gather(x: Tensor, comm: Communicator, dim: int, subject: str) -> Tensor:
    full = torch.empty(comm.size * x.numel(), dtype=x.dtype, device=x.device)
    comm.all_gather(full, x.contiguous().view(-1), subject).wait()
    return torch.cat(list(full.view(comm.size, *x.shape)), dim)


def _reduce_scatter(x: Tensor, comm: Communicator, dim: int, subject: str) -> Tensor:
    parts = torch.stack(x.chunk(comm.size, dim))
    shard = torch.empty_like(parts[0])
    comm.reduce_scatter(shard, parts, subject).wait()
    return shard


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, subject: str) -> Tensor:
        ctx.comm, ctx.subject = comm, subject
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grad, ctx.comm, f"{ctx.subject}: gradient of the input"), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, subject: str) -> Tensor:
        return _all_reduce(x, comm, subject)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _GatherSlice(torch.autograd.Function):
    """All-gather along a dimension whose consumers are the same on every rank: backward takes this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, subject: str) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _gather(x, comm, dim, subject)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.chunk(ctx.comm.size, ctx.dim)[ctx.comm.rank].contiguous(), None, None, None


class _SliceGather(torch.autograd.Function):
    """This rank's slice of what all ranks hold: backward all-gathers the slices' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, subject: str) -> Tensor:
        ctx.comm, ctx.dim, ctx.subject = comm, dim, subject
        return x.chunk(comm.size, dim)[comm.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.comm, ctx.dim, f"{ctx.subject}: gradient"), None, None, None


class GatherReduce(torch.autograd.Function):
    """f with a split sequence: all-gather along a dimension, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, subject: str) -> Tensor:
        ctx.comm, ctx.dim, ctx.subject = comm, dim, subject
        return _gather(x, comm, dim, subject)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce_scatter(grad, ctx.comm, ctx.dim, f"{ctx.subject}: gradient of the input"), None, None, None


class _ReduceGather(torch.autograd.Function):
    """g with a split sequence: reduce-scatter, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int, subject: str) -> Tensor:
        ctx.comm, ctx.dim, ctx.subject = comm, dim, subject
        return _reduce_scatter(x, comm, dim, subject)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.comm, ctx.dim, f"{ctx.subject}: gradient"), None, None, None


@dataclass
class Region:
    """A tensor group's region borders. With `splits` activations outside it [B, S, ...] are cut along S, padded to a multiple."""

    comm: Communicator
    splits: bool = False
    length: int = 0  # tokens before padding, of the running forward

    def enter(self, x: Tensor, subject: str) -> Tensor:
        if not self.splits:
            out: Tensor = _Enter.apply(x, self.comm, subject)
            return out
        whole: Tensor = GatherReduce.apply(x, self.comm, 1, subject)
        return whole[:, : self.length]

    def leave(self, x: Tensor, subject: str) -> Tensor:
        out: Tensor
        if not self.splits:
            out = _Leave.apply(x, self.comm, subject)
        else:
            out = _ReduceGather.apply(self._pad(x), self.comm, 1, subject)
        return out

    def split(self, x: Tensor, subject: str) -> Tensor:
        """Where the sequence begins to be split: [B, S, D] that all ranks hold -> [B, S/N, D]."""
        self.length = x.shape[1]
        out: Tensor = _SliceGather.apply(self._pad(x), self.comm, 1, subject)
        return out

    def valid(self, mask: Tensor | None) -> Tensor | None:
        """Of `mask` [B, S] (None: all are tokens) this rank's slice, [B or 1, S/N]; None if all rows are tokens."""
        missing = -self.length % self.comm.size
        if mask is None and not missing:
            return None
        whole = torch.ones(1, self.length, dtype=torch.bool) if mask is None else mask != 0
        return F.pad(whole, (0, missing)).chunk(self.comm.size, 1)[self.comm.rank]

    def join(self, x: Tensor, subject: str) -> Tensor:
        """Where it is whole again, the same on all ranks."""
        out: Tensor = _GatherSlice.apply(x, self.comm, 1, subject)
        return out[:, : self.length]

    def gather_last(self, x: Tensor, subject: str) -> Tensor:
        """[..., V/N] -> [..., V] on every rank."""
        out: Tensor = _GatherSlice.apply(x, self.comm, x.dim() - 1, subject)
        return out

    def _pad(self, x: Tensor) -> Tensor:
        missing = -x.shape[1] % self.comm.size
        return F.pad(x, (0, 0, 0, missing)) if missing else x


class Entry:
    """One f for all the layers that read the same tensor (q, k and v; gate and up)."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, subject: str) -> Tensor:
        if self._last is not None and self._last[0]() is x:
            known = self._last[1]
            if known.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
                return known
        out = self._region.enter(x, subject)
        self._last = weakref.ref(x, self._forget), out
        return out

    def _forget(self, dead: weakref.ref[Tensor]) -> None:
        """The module above let go of its input: nobody will ask for it again."""
        if self._last is not None and self._last[0] is dead:
            self._last = None
