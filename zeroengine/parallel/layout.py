"""Which rank holds which tokens of a sequence.

A sequence is padded to a multiple of `ring * ulysses` (twice that for the zigzag) and cut. Along the ring a member holds
*spans*: one contiguous piece, or with the zigzag the i-th piece from the head and the i-th from the tail, so that
causal attention costs every member the same. Inside a ring member's tokens the Ulysses ranks hold contiguous slices; the
rank of (ring i, ulysses j) is i * ulysses + j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroengine.errors import ConfigError


@dataclass(frozen=True)
class Span:
    """Tokens [start, start + length) of the whole sequence."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class SequenceLayout:
    """The placement of `length` tokens on `ring` x `ulysses` ranks."""

    length: int
    ring: int = 1
    ulysses: int = 1
    zigzag: bool = True

    def __post_init__(self) -> None:
        if self.length < 1 or self.ring < 1 or self.ulysses < 1:
            raise ConfigError(f"a sequence of {self.length} tokens on {self.ring} x {self.ulysses} ranks: each must be at least 1")

    @property
    def size(self) -> int:
        """Number of ranks that share the sequence."""
        return self.ring * self.ulysses

    @property
    def pieces(self) -> int:
        """Pieces of equal length along the ring."""
        return 2 * self.ring if self.zigzag and self.ring > 1 else self.ring

    @property
    def padded(self) -> int:
        """Tokens with padding: the next multiple that can be cut evenly."""
        step = self.pieces * self.ulysses
        return -(-self.length // step) * step

    @property
    def local(self) -> int:
        """Tokens that each rank holds."""
        return self.padded // self.size

    def spans(self, member: int) -> tuple[Span, ...]:
        """What ring member `member` holds, in its local order."""
        piece = self.padded // self.pieces
        if self.pieces == self.ring:
            return (Span(member * piece, piece),)
        return Span(member * piece, piece), Span((2 * self.ring - 1 - member) * piece, piece)

    def index(self, rank: int) -> Tensor:
        """Positions in the padded sequence of the tokens of `rank`, [local] int64."""
        member, slot = divmod(rank, self.ulysses)
        held = torch.cat([torch.arange(s.start, s.end) for s in self.spans(member)])
        return held[slot * self.local : (slot + 1) * self.local]

    def pad(self, whole: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """`whole` (with `length` along `dim`) extended by `fill` to `padded`."""
        if whole.shape[dim] != self.length:
            raise ValueError(f"dimension {dim} of a tensor of shape {tuple(whole.shape)} is not the sequence of {self.length} tokens")
        if self.padded == self.length:
            return whole
        shape = list(whole.shape)
        shape[dim] = self.padded - self.length
        return torch.cat([whole, whole.new_full(shape, fill)], dim)

    def shard(self, whole: Tensor, rank: int, dim: int = 1, fill: float = 0) -> Tensor:
        """The tokens of `rank` out of `whole`, which has all `length` tokens along `dim`; padding is `fill`."""
        return self.pad(whole, dim, fill).index_select(dim, self.index(rank).to(whole.device))

    def unshard(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence out of the ranks' `parts`, in order of rank; padding is dropped."""
        order = torch.cat([self.index(r) for r in range(self.size)])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
        return torch.cat(tuple(parts), dim).index_select(dim, back[: self.length].to(parts[0].device))
