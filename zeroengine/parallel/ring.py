"""Exact attention over a sequence that is spread over a ring of ranks (Ring Attention, Liu et al. 2023).

Keys and values travel once around the ring while each rank computes the block it has at hand. Partial results are
merged by their log-sum-exp in the wide type (fp32); in backward keys and values travel again, together with the
accumulators of dK and dV in the wide type. With N ranks and a shard of M bytes of K and V together, a rank sends (N-1) M in
forward and, in backward, (N-1) M and N times the accumulators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator, Work
from zeroengine.parallel.kernels import Kernel, kernel_for, wide
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.masks import AttentionMask, Block, Kind


def shift(comm: Communicator, received: Tensor, sent: Tensor, subject: str) -> Work:
    """Sends to the next rank of the ring and receives from the previous one: one operation that cannot deadlock."""
    out, into = [0] * comm.size, [0] * comm.size
    out[(comm.rank + 1) % comm.size] = sent.numel()
    into[(comm.rank - 1) % comm.size] = received.numel()
    return comm.all_to_all(received, sent, subject, output_splits=into, input_splits=out)


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, where their tokens lie, and who attends to whom."""

    comm: Communicator
    layout: SequenceLayout
    mask: AttentionMask
    subject: str = "attention"

    def blocks(self, source: int) -> tuple[Block, ...]:
        """Blocks of this rank's queries against the keys of ring member `source`."""
        return self.mask.blocks(self.layout.spans(self.comm.rank), self.layout.spans(source))

    def allowed(self, block: Block, device: torch.device) -> Tensor | None:
        return self.mask.allowed(block, device) if block.kind is Kind.MASKED else None


class _Travel:
    """K and V on their way around the ring: `visit` calls `work(source, k, v)` for each member's, the next on its way."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring = ring
        self._shapes = k.shape, v.shape
        self._at_hand = torch.cat([k.reshape(-1), v.reshape(-1)]) if ring.comm.size > 1 else torch.empty(0)
        self._first = k, v

    def visit(self, work: Callable[[int, Tensor, Tensor], None]) -> None:
        comm = self._ring.comm
        for step in range(comm.size):
            moving: Work | None = None
            coming = torch.empty_like(self._at_hand)
            if step < comm.size - 1:
                moving = shift(comm, coming, self._at_hand, f"{self._ring.subject}: keys and values")
            k, v = self._first if step == 0 else self._split()
            work((comm.rank - step) % comm.size, k, v)
            if moving is not None:
                moving.wait()
                self._at_hand = coming

    def _split(self) -> tuple[Tensor, Tensor]:
        keys, values = self._shapes
        cut = keys.numel()
        return self._at_hand[:cut].view(keys), self._at_hand[cut:].view(values)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float) -> Tensor:
        kernel: Kernel = kernel_for(q, v)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide(q.dtype), device=q.device)
        lse = torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device=q.device)

        def work(source: int, keys: Tensor, values: Tensor) -> None:
            for b in ring.blocks(source):
                part, part_lse = kernel.forward(
                    q[:, :, b.rows], keys[:, :, b.columns], values[:, :, b.columns], scale, b.kind, ring.allowed(b, q.device)
                )
                _merge(out[:, :, b.rows], lse[:, :, b.rows], part, part_lse)

        _Travel(ring, k, v).visit(work)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring, ctx.scale, ctx.kernel = ring, scale, kernel
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        kernel: Kernel = ctx.kernel
        grad = grad.contiguous()
        dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        home = _Accumulators(ring, k, v)

        def work(source: int, keys: Tensor, values: Tensor) -> None:
            dk, dv = (torch.zeros(t.shape, dtype=dq.dtype, device=t.device) for t in (keys, values))
            for b in ring.blocks(source):
                rows, columns = b.rows, b.columns
                part = kernel.backward(
                    grad[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns], out[:, :, rows],
                    lse[:, :, rows], ctx.scale, b.kind, ring.allowed(b, q.device),
                )  # fmt: skip
                dq[:, :, rows] += part[0]
                dk[:, :, columns] += part[1]
                dv[:, :, columns] += part[2]
            home.add(dk, dv)

        _Travel(ring, k, v).visit(work)
        dk, dv = home.result()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class _Accumulators:
    """dK and dV of the keys at hand: they follow their keys, one block behind, and come home after the last."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring = ring
        self._shapes = k.shape, v.shape
        self._coming: Tensor | None = None
        self._moving: Work | None = None

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """What this rank found for the keys at hand; waits for what the ranks before it found, and sends both on."""
        total = torch.cat([dk.view(-1), dv.view(-1)])
        if self._moving is not None and self._coming is not None:
            self._moving.wait()
            total += self._coming
        self._coming = total
        if self._ring.comm.size > 1:
            coming = torch.empty_like(total)
            self._moving = shift(self._ring.comm, coming, total, f"{self._ring.subject}: gradients of keys and values")
            self._coming = coming

    def result(self) -> tuple[Tensor, Tensor]:
        if self._coming is None:
            raise RuntimeError(f"{self._ring.subject}: no block was computed")
        if self._moving is not None:
            self._moving.wait()
        keys, values = self._shapes
        cut = keys.numel()
        return self._coming[:cut].view(keys), self._coming[cut:].view(values)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Online softmax: (out, lse) becomes the attention over the keys of both. In place."""
    both = torch.logaddexp(lse, part_lse)
    none = both == -math.inf  # -inf - -inf is no number
    old = torch.exp(lse - both).masked_fill_(none, 0.0)[..., None]
    new = torch.exp(part_lse - both).masked_fill_(none, 0.0)[..., None]
    out.mul_(old).add_(part.to(out.dtype) * new)
    lse.copy_(both)


def attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float | None = None) -> Tensor:
    """Attention of this ring member's tokens to all tokens of the ring. Collective over the ring, also in backward.

    q [B, H, local, D], k [B, G, local, D], v [B, G, local, Dv], local = tokens of one ring member, H a multiple of G;
    returns [B, H, local, Dv] in q's type. `scale` defaults to 1 / sqrt(D).
    """
    held = sum(s.length for s in ring.layout.spans(ring.comm.rank))
    if q.shape[2] != held or k.shape[2] != held or v.shape[2] != held:
        raise ValueError(
            f"{ring.subject}: queries of {q.shape[2]}, keys of {k.shape[2]} and values of {v.shape[2]} tokens; with "
            f"{ring.layout} ring member {ring.comm.rank} holds {held}"
        )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{ring.subject}: {q.shape[1]} query heads over {k.shape[1]} key and {v.shape[1]} value heads")
    out: Tensor = _RingAttention.apply(q, k, v, ring, q.shape[-1] ** -0.5 if scale is None else scale)
    return out
