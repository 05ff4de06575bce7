"""Sequence <-> heads: before attention every rank trades its slice of the sequence for a share of the heads
(DeepSpeed-Ulysses, Jacobs et al. 2023), and trades back after it.

Each rank gets a contiguous share of the query heads, the first ones one more where they do not divide, and exactly the
key heads that its query heads read: a key head goes to several ranks where they share it (fewer key heads than ranks), and is
never repeated on one. q, k and v travel in one all-to-all; with H and G heads on N ranks and a local tensor of one head of
m bytes, a rank sends (N-1)/N (H + 2G) m before and (N-1)/N H m after attention when all divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator


@dataclass(frozen=True)
class HeadPlan:
    """Who computes which heads. Belongs to one attention module: nothing is shared between models."""

    query_heads: int
    key_heads: int
    ranks: int

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.query_heads % self.key_heads:
            raise ValueError(f"{self.query_heads} query heads over {self.key_heads} key heads: the first must be a multiple of the second")

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.query_heads // self.key_heads

    def queries(self, rank: int) -> range:
        """Query heads of `rank`."""
        share, rest = divmod(self.query_heads, self.ranks)
        start = rank * share + min(rank, rest)
        return range(start, start + share + (rank < rest))

    def keys(self, rank: int) -> range:
        """Key heads that the query heads of `rank` read."""
        mine = self.queries(rank)
        return range(mine.start // self.group, -(-mine.stop // self.group)) if mine else range(0)

    def key_of(self, rank: int) -> list[int] | None:
        """For each query head of `rank` its place among `keys(rank)`; None where they divide as grouped heads do."""
        mine, keys = self.queries(rank), self.keys(rank)
        each = len(mine) // max(len(keys), 1)
        wanted = [h // self.group - keys.start for h in mine]
        return None if wanted == [i // max(each, 1) for i in range(len(mine))] else wanted


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, comm: Communicator, sends: list[int], receives: list[int], subject: str) -> Tensor:
        ctx.comm, ctx.sends, ctx.receives, ctx.subject = comm, sends, receives, subject
        return _exchange(flat, comm, sends, receives, subject)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = _exchange(grad.contiguous(), ctx.comm, ctx.receives, ctx.sends, f"{ctx.subject}: gradients")
        return back, None, None, None, None


def _exchange(flat: Tensor, comm: Communicator, sends: list[int], receives: list[int], subject: str) -> Tensor:
    out = torch.empty(sum(receives), dtype=flat.dtype, device=flat.device)
    if len({*sends, *receives}) == 1:
        comm.all_to_all(out, flat, subject).wait()
    else:
        comm.all_to_all(out, flat, subject, output_splits=receives, input_splits=sends).wait()
    return out


def _trade(
    blocks: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], comm: Communicator, subject: str
) -> list[list[Tensor]]:
    """Sends the tensors `blocks[j]` to rank j; returns what each rank i sent, of `shapes[i]`. Differentiable."""
    flat = torch.cat([t.reshape(-1) for block in blocks for t in block])
    sends = [sum(t.numel() for t in block) for block in blocks]
    sizes = [[torch.Size(s).numel() for s in row] for row in shapes]
    got: Tensor = _AllToAll.apply(flat, comm, sends, [sum(row) for row in sizes], subject)
    parts = iter(got.split([n for row in sizes for n in row]))
    return [[next(parts).view(s) for s in row] for row in shapes]


@dataclass(frozen=True)
class HeadExchange:
    """The two trades around one attention. Tensors are [B, heads, tokens, D]; `lengths` are the tokens of each rank."""

    comm: Communicator
    plan: HeadPlan
    lengths: tuple[int, ...]
    subject: str = "attention"

    def scatter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From all heads of this rank's tokens to this rank's heads of all tokens."""
        plan, me = self.plan, self.comm.rank
        blocks, shapes = [], []
        heads = len(plan.queries(me)), len(plan.keys(me)), len(plan.keys(me))
        for r in range(self.comm.size):
            mine, keys = plan.queries(r), plan.keys(r)
            blocks.append([
                q[:, mine.start : mine.stop], k[:, keys.start : keys.stop], v[:, keys.start : keys.stop]
            ])  # fmt: skip
            shapes.append([
                (x.shape[0], n, self.lengths[r], x.shape[3]) for x, n in zip((q, k, v), heads, strict=True)
            ])  # fmt: skip
        got = _trade(blocks, shapes, self.comm, f"{self.subject}: sequence to heads")
        queries, keys_, values = (torch.cat([row[i] for row in got], 2) for i in range(3))
        chosen = plan.key_of(me)
        if chosen is not None:
            index = torch.tensor(chosen, device=q.device)
            keys_, values = keys_.index_select(1, index), values.index_select(1, index)
        return queries, keys_, values

    def gather(self, out: Tensor) -> Tensor:
        """From this rank's heads of all tokens back to all heads of this rank's tokens."""
        b, _, _, d = out.shape
        blocks = [[part] for part in out.split(list(self.lengths), 2)]
        shapes = [[(b, len(self.plan.queries(r)), self.lengths[self.comm.rank], d)] for r in range(self.comm.size)]
        return torch.cat([row[0] for row in _trade(blocks, shapes, self.comm, f"{self.subject}: heads to sequence")], 1)


def over_heads(
    q: Tensor, k: Tensor, v: Tensor, comm: Communicator, attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    lengths: Sequence[int] | None = None, subject: str = "attention",
) -> Tensor:  # fmt: skip
    """Runs `attention` on this rank's heads of the whole sequence. Collective over `comm`, also in backward.

    q [B, H, local, D], k and v [B, G, local, D]; `attention` maps [B, h, whole, D] and [B, g, whole, D] (h a multiple of g)
    to [B, h, whole, Dv]; returns [B, H, local, Dv]. `lengths`: tokens of each rank, default the same on all. A rank
    without heads (more ranks than heads) does not call `attention`.
    """
    if comm.size == 1:
        return attention(q, k, v)
    sizes = tuple(lengths) if lengths is not None else (q.shape[2],) * comm.size
    if len(sizes) != comm.size or sizes[comm.rank] != q.shape[2]:
        raise ValueError(f"{subject}: {q.shape[2]} tokens on rank {comm.rank} of {comm.size}, but lengths {sizes}")
    trade = HeadExchange(comm, HeadPlan(q.shape[1], k.shape[1], comm.size), sizes, subject)
    queries, keys, values = trade.scatter(q, k, v)
    if queries.shape[1]:
        out = attention(queries, keys, values)
    else:  # nothing to compute, but the way back must stay in the graph
        out = queries.new_empty(*queries.shape[:3], values.shape[3]) + (queries.sum() + keys.sum() + values.sum())
    return trade.gather(out)
