"""Which element of which parameter lies where: buckets, their padding, and every rank's slice.

A bucket is one flat buffer over an ordered list of parameters (same dtype, same ranks, same sharding rule),
padded at its end to a multiple of the shard count; rank r of N owns the contiguous slice r. Nothing here touches values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroengine.zero.tensor import TensorShard


@dataclass(frozen=True)
class ParamSpec:
    """One parameter in a bucket. `offset` and `numel` are in elements of the bucket's flat buffer."""

    name: str
    shape: torch.Size
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Segment:
    """The part of parameter `index` that lies in a range of the bucket: elements [start, end) of the flattened parameter,
    at [at, at + end - start) of the range."""

    index: int
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class BucketLayout:
    """Positions of parameters in one flat buffer of `padded` elements, cut into `shards` equal slices."""

    specs: tuple[ParamSpec, ...]
    shards: int

    @staticmethod
    def build(named_shapes: Sequence[tuple[str, torch.Size]], shards: int) -> BucketLayout:
        specs, offset = [], 0
        for name, shape in named_shapes:
            numel = math.prod(shape)
            specs.append(ParamSpec(name, torch.Size(shape), offset, numel))
            offset += numel
        return BucketLayout(tuple(specs), shards)

    @property
    def numel(self) -> int:
        return self.specs[-1].end if self.specs else 0

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.shards)

    @property
    def padded(self) -> int:
        return self.shard_numel * self.shards

    def slice_of(self, shard: int) -> tuple[int, int]:
        """Element range [start, end) of the flat buffer that shard index `shard` owns."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def segments(self, start: int, end: int) -> Iterator[Segment]:
        """Parameters' non-empty parts in elements [start, end) of the flat buffer, in order."""
        for i, spec in enumerate(self.specs):
            lo, hi = max(start, spec.offset), min(end, spec.end)
            if lo < hi:
                yield Segment(i, lo - spec.offset, hi - spec.offset, lo - start)


@dataclass
class Piece:
    """A contiguous range of a named tensor that this rank holds: elements [start, start + data.numel()) of the flattened
    tensor of `shape`. The unit in which state is saved and loaded; `data` is 1-D and may be written in place. With `part`
    that tensor is itself a part of a whole one, which is what is saved."""

    name: str
    shape: torch.Size
    start: int
    data: Tensor
    part: TensorShard | None = None
