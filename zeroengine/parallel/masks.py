"""Which pairs of tokens attend to one another, and the blocks of such pairs between two sets of spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from zeroengine.parallel.layout import SequenceLayout, Span

_TILE = 1024  # rows of a block with an explicit mask: bounds the memory of the mask


class Kind(Enum):
    """How a block is masked."""

    FULL = "full"
    DIAGONAL = "diagonal"  # same tokens on both sides, causal
    MASKED = "masked"  # needs an explicit mask


@dataclass(frozen=True)
class Block:
    """Queries `q` (at `q_at` of the local queries) against keys `k` (at `k_at` of the keys at hand)."""

    q: Span
    k: Span
    q_at: int
    k_at: int
    kind: Kind

    @property
    def rows(self) -> slice:
        return slice(self.q_at, self.q_at + self.q.length)

    @property
    def columns(self) -> slice:
        return slice(self.k_at, self.k_at + self.k.length)

    @property
    def work(self) -> int:
        """Pairs that are computed."""
        n = self.q.length
        return n * (n + 1) // 2 if self.kind is Kind.DIAGONAL else n * self.k.length


@dataclass(frozen=True)
class AttentionMask:
    """Token q attends to token k if k is in the same document, not later (`causal`), and nearer than `window`.

    Positions count from the start of the row. `window`: q - k < window (without `causal`: |q - k| < window).
    `documents`: [batch or 1, tokens] int64, equal numbers of neighbours are one document, -1 is padding that nobody
    attends to; it covers the *whole* padded sequence on every rank. A query without any key gives zeros.
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    _plans: dict[tuple[tuple[Span, ...], tuple[Span, ...]], tuple[Block, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"an attention window of {self.window} tokens; it must be at least 1")
        if self.documents is not None and self.documents.dim() != 2:
            raise ValueError(f"documents has shape {tuple(self.documents.shape)}; it must be [batch, tokens]")

    def over(self, layout: SequenceLayout) -> AttentionMask:
        """This mask for the padded sequence of `layout`, where padding must be hidden."""
        documents = self.documents
        if documents is None:
            if self.causal or layout.padded == layout.length:  # padding comes last: causal queries never see it
                return self
            documents = torch.zeros(1, layout.length, dtype=torch.int64)
        if documents.shape[1] == layout.padded:
            return self
        return AttentionMask(self.causal, self.window, layout.pad(documents, fill=-1))

    def blocks(self, queries: tuple[Span, ...], keys: tuple[Span, ...]) -> tuple[Block, ...]:
        """The blocks with anything to compute; each query row and key column lies in its span's place."""
        found = self._plans.get((queries, keys))
        if found is None:
            made: list[Block] = []
            q_at = 0
            for q in queries:
                k_at = 0
                for k in keys:
                    self._cut(made, q, k, q_at, k_at)
                    k_at += k.length
                q_at += q.length
            found = self._plans[queries, keys] = tuple(made)
        return found

    def allowed(self, block: Block, device: torch.device) -> Tensor:
        """[batch or 1, 1, rows, columns] bool: True where the pair attends."""
        q = torch.arange(block.q.start, block.q.end, device=device)[:, None]
        k = torch.arange(block.k.start, block.k.end, device=device)[None, :]
        ok = torch.ones(block.q.length, block.k.length, dtype=torch.bool, device=device)
        if self.causal:
            ok &= k <= q
        if self.window is not None:
            ok &= q - k < self.window
            if not self.causal:
                ok &= k - q < self.window
        ok = ok[None, None]
        if self.documents is not None:
            dq = self.documents[:, block.q.start : block.q.end].to(device)
            dk = self.documents[:, block.k.start : block.k.end].to(device)
            ok = ok & ((dq[:, :, None] == dk[:, None, :]) & (dk >= 0)[:, None, :])[:, None]
        return ok

    def _cut(self, made: list[Block], q: Span, k: Span, q_at: int, k_at: int) -> None:
        """Drops keys that no query reaches, and adds what is left as one block or as tiles."""
        low, high = k.start, k.end
        if self.causal:
            high = min(high, q.end)
        if self.window is not None:
            low = max(low, q.start - self.window + 1)
            if not self.causal:
                high = min(high, q.end + self.window - 1)
        if low >= high or not self._meet(q, Span(low, high - low)):
            return
        k, k_at = Span(low, high - low), k_at + low - k.start
        kind = self._kind(q, k)
        if kind is not Kind.MASKED or q.length <= _TILE:
            made.append(Block(q, k, q_at, k_at, kind))
            return
        for at in range(0, q.length, _TILE):
            self._cut(made, Span(q.start + at, min(_TILE, q.length - at)), k, q_at + at, k_at)

    def _kind(self, q: Span, k: Span) -> Kind:
        if not self._one_document(q, k):
            return Kind.MASKED
        reach = q.end - 1 - k.start if self.causal else max(q.end - 1 - k.start, k.end - 1 - q.start)
        if self.window is not None and reach >= self.window:
            return Kind.MASKED
        if not self.causal or k.end - 1 <= q.start:
            return Kind.FULL
        return Kind.DIAGONAL if q == k else Kind.MASKED

    def _meet(self, q: Span, k: Span) -> bool:
        """Some document may lie on both sides."""
        if self.documents is None:
            return True
        dq, dk = self.documents[:, q.start : q.end], self.documents[:, k.start : k.end]
        return bool(((dq.amax(1) >= dk.amin(1)) & (dk.amax(1) >= dq.amin(1)) & (dk.amax(1) >= 0)).any())

    def _one_document(self, q: Span, k: Span) -> bool:
        if self.documents is None:
            return True
        both = torch.cat([self.documents[:, q.start : q.end], self.documents[:, k.start : k.end]], 1)
        return bool((both == both[:, :1]).all()) and bool((both[:, 0] >= 0).all())


def attention_work(mask: AttentionMask, layout: SequenceLayout) -> list[int]:
    """Pairs of tokens that each ring member computes, for one head and row."""
    members = [layout.spans(m) for m in range(layout.ring)]
    return [sum(b.work for k in members for b in mask.blocks(q, k)) for q in members]


def documents_from_positions(positions: Tensor) -> Tensor:
    """[batch, tokens] document numbers out of position ids that start again at every document; -1s stay out."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return starts.cumsum(1) - 1


def documents_from_lengths(lengths: Sequence[int]) -> Tensor:
    """[1, sum(lengths)] document numbers of documents packed one after another (`cu_seqlens` are their running sum)."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
