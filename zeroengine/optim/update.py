"""The update of flat shards by any element-wise torch optimizer.

The optimizer sees one 1-D tensor for each parameter's part in this rank's range, a view into the flat master, so that
its arithmetic, its treatment of parameters without gradient and its per-parameter step counts are torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import ConfigError
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.gradients import BucketGradients
from zeroengine.zero.layout import Piece
from zeroengine.zero.residency import slot_of

_CUT_RANKS = 64


@dataclass(frozen=True)
class _Part:
    """A parameter's elements [start, end) in this rank's range, at `at` of the range; `view` is what is optimized."""

    name: str
    shape: torch.Size
    start: int
    at: int
    view: nn.Parameter


class FlatMaster:
    """Master values of the range of one bucket that this rank updates, and their link to values and gradients.

    For fp32 and fp64 buckets the master *is* the bucket's memory; for 16-bit ones it is an fp32 copy.
    """

    def __init__(self, gradients: BucketGradients, master: Tensor | None, whole_shapes: bool) -> None:
        self.gradients = gradients
        self.bucket: Bucket = gradients.bucket
        bucket = self.bucket
        held = bucket.shard if bucket.policy.shard_state else bucket.full
        self._values: Tensor = held if held is not None else bucket.shard
        self.separate = master is not None
        self.flat: Tensor = self._values if master is None else master
        self.parts: dict[int, list[_Part]] = {}
        for index, start, end, at in self._ranges(whole_shapes):
            spec = bucket.layout.specs[index]
            view = self.flat[at : at + end - start]
            view = view.view(spec.shape) if whole_shapes and end - start == spec.numel else view
            part = _Part(spec.name, spec.shape, start, at, nn.Parameter(view.detach()))
            self.parts.setdefault(index, []).append(part)

    def _ranges(self, whole_shapes: bool) -> Iterator[tuple[int, int, int, int]]:
        """(parameter, start, end, position in `flat`). Where this rank updates everything, parameters are still cut at the
        borders of the ranks' slices: torch's fused loops round the last few elements of a tensor differently, and the
        stages must agree to the last bit. Not with so many ranks that the cuts would cost time."""
        layout, policy = self.bucket.layout, self.bucket.policy
        if policy.shard_state:
            cuts = [(self.bucket.own.start, self.bucket.own.stop)]
        elif whole_shapes or layout.shards > _CUT_RANKS:
            cuts = [(0, layout.padded)]
        else:
            cuts = [layout.slice_of(r) for r in range(layout.shards)]
        origin = cuts[0][0]
        for start, end in cuts:
            for s in layout.segments(start, end):
                yield s.index, s.start, s.end, start - origin + s.at

    def link(self, used: frozenset[str]) -> None:
        """Points `.grad` of the parts at the reduced gradients; parts of unused parameters get None, as in torch."""
        grads = self.gradients.updated
        for parts in self.parts.values():
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


def is_elementwise(cls: type[torch.optim.Optimizer]) -> bool | None:
    """Whether each element is updated by itself, so that flat pieces are right. None: not known for this class.

    A class can declare it with an attribute `elementwise = True`.
    """
    declared = getattr(cls, "elementwise", None)
    if isinstance(declared, bool):
        return declared
    return cls.__name__ in _ELEMENTWISE if cls.__module__.startswith("torch.optim") else None


_ELEMENTWISE = frozenset(
    {"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "SGD"}
)


def check_optimizer(optimizer: torch.optim.Optimizer, sharded: bool, allow_untested: bool) -> None:
    """Refuses an optimizer that would be fed pieces it does not understand."""
    known = is_elementwise(type(optimizer))
    name = type(optimizer).__name__
    if optimizer.state:
        raise ConfigError(
            f"the optimizer {name} has state already; give zeroengine.initialize a fresh one and load a checkpoint with "
            "engine.load_checkpoint"
        )
    if not sharded or known or (known is None and allow_untested):
        return
    if known is False:
        raise ConfigError(
            f"optimizer {name} looks at whole matrices or needs a closure, and ZeRO stages 1 to 3 give each rank a "
            "flat piece of every parameter; use zero_optimization.stage 0 with it, or an element-wise "
            "optimizer (Adam, AdamW, SGD, ...)"
        )
    raise ConfigError(
        f"optimizer {name} is not known to update each element by itself, and ZeRO stages 1 to 3 give it flat pieces of the "
        'parameters; set "zero_allow_untested_optimizer": true if it does, or use zero_optimization.stage 0'
    )


def shard_groups(groups: list[dict[str, Any]], masters: dict[int, FlatMaster]) -> list[list[nn.Parameter]]:
    """For each parameter group of the user, the parts of its parameters on this rank. `masters` by bucket index."""
    taken: dict[int, int] = {}
    result = []
    for g, group in enumerate(groups):
        parts: list[nn.Parameter] = []
        for p in group["params"]:
            slot = slot_of(p)
            if slot is None or not isinstance(slot.bucket, Bucket):
                if not p.requires_grad or not p.numel():
                    continue
                raise ConfigError(
                    f"parameter group {g} has a tensor of shape {tuple(p.shape)} that is not a parameter of the model given "
                    "to zeroengine.initialize; build the groups from that model's parameters"
                )
            if id(p) in taken:
                raise ConfigError(
                    f"parameter '{slot.name}' is in parameter groups {taken[id(p)]} and {g}; put it in one"
                )
            taken[id(p)] = g
            master = masters.get(slot.bucket.index)
            if master is not None:
                parts.extend(part.view for part in master.parts.get(slot.index, []))
        result.append(parts)
    return result
