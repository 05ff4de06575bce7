"""The update of flat shards by an element-wise torch optimizer.

The optimizer sees one 1-D tensor for each parameter's part in this rank's range, a view into the flat master, so that
its arithmetic, its treatment of parameters without gradient and its per-parameter step counts are torch's own.
Parameters that the optimizer must see whole are `whole.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroengine.zero.bucket import Bucket
from zeroengine.zero.gradients import BucketGradients
from zeroengine.zero.layout import Piece

_CUT_RANKS = 64


@dataclass(frozen=True)
class Part:
    """A parameter's elements [start, end) in this rank's range, at `at` of the range; `view` is what is optimized."""

    name: str
    shape: torch.Size
    start: int
    at: int
    view: nn.Parameter


class FlatMaster:
    """Master values of the range of one bucket that this rank updates, and their link to values and gradients.

    For fp32 and fp64 buckets the master *is* the bucket's memory; for 16-bit ones it is an fp32 copy. `apart`:
    indices of the parameters that `WholeUpdate` updates; their parts are not linked to gradients.
    """

    def __init__(self, gradients: BucketGradients, master: Tensor | None) -> None:
        self.gradients = gradients
        self.bucket: Bucket = gradients.bucket
        bucket = self.bucket
        held = bucket.shard if bucket.policy.shard_state else bucket.full
        self._values: Tensor = held if held is not None else bucket.shard
        self.separate = master is not None
        self.flat: Tensor = self._values if master is None else master
        self.parts: dict[int, list[Part]] = {}
        self.apart: frozenset[int] = frozenset()
        for index, start, end, at in self._ranges():
            spec = bucket.layout.specs[index]
            part = Part(spec.name, spec.shape, start, at, nn.Parameter(self.flat[at : at + end - start].detach()))
            self.parts.setdefault(index, []).append(part)

    def _ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """(parameter, start, end, position in `flat`). Where this rank updates everything, parameters are still cut at the
        borders of the ranks' slices: torch's fused loops round the last few elements of a tensor differently, and the
        stages must agree to the last bit. Not with so many ranks that the cuts would cost time."""
        layout, policy = self.bucket.layout, self.bucket.policy
        if policy.shard_state:
            own = self.bucket.own
            for s in layout.segments(own.start, own.stop):
                yield s.index, s.start, s.end, s.at
            return
        cuts = [layout.slice_of(r) for r in range(layout.shards)] if layout.shards <= _CUT_RANKS else [(0, layout.padded)]
        for start, end in cuts:
            for s in layout.segments(start, end):
                yield s.index, s.start, s.end, start + s.at

    def widen(self, indices: frozenset[int]) -> None:
        """From now on the optimizer sees the parameters of these indices in their own shape: here where this rank updates
        everything, else they are `apart`. It must not know parts of them yet."""
        if self.bucket.policy.shard_state:
            self.apart |= indices
            return
        for index in indices:
            spec = self.bucket.layout.specs[index]
            view = nn.Parameter(self.flat[spec.offset : spec.end].view(spec.shape).detach())
            self.parts[index] = [Part(spec.name, spec.shape, 0, spec.offset, view)]

    def link(self, used: frozenset[str]) -> None:
        """Points `.grad` of the parts at the reduced gradients; parts of unused parameters get None, as in torch."""
        grads = self.gradients.updated
        for index, parts in self.parts.items():
            if index in self.apart:
                continue
            for part in parts:
                if part.name not in used:
                    part.view.grad = None
                    continue
                grad = grads[part.at : part.at + part.view.numel()].view(part.view.shape)
                part.view.grad = grad if grad.dtype is part.view.dtype else grad.to(part.view.dtype)

    def unlink(self) -> None:
        for parts in self.parts.values():
            for part in parts:
                part.view.grad = None

    def write_values(self) -> None:
        """Writes masters to the values of this rank's range."""
        if self.separate:
            self._values.copy_(self.flat)

    def publish(self) -> None:
        """Writes masters to the values and issues what brings them to the other ranks."""
        self.write_values()
        if self.bucket.policy.shard_state:
            self.bucket.publish()
        else:
            self.bucket.version += 1

    def refresh(self) -> None:
        """Makes the master follow the values where they changed (weights were loaded or edited); elsewhere it keeps its
        precision."""
        if self.separate:
            changed = self.flat.to(self._values.dtype) != self._values
            self.flat.copy_(torch.where(changed, self._values.to(self.flat.dtype), self.flat))

    def pieces(self) -> Iterator[tuple[nn.Parameter, Piece]]:
        """Every part as a `Piece` of its parameter's master values."""
        for parts in self.parts.values():
            for part in parts:
                yield part.view, Piece(part.name, part.shape, part.start, part.view.data.view(-1))
