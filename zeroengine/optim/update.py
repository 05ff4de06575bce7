"""The update of flat shards by an element-wise torch optimizer.

The optimizer sees one 1-D tensor for each parameter's part in this rank's range, a view into the flat master, so that
its arithmetic, its treatment of parameters without gradient and its per-parameter step counts are torch's own.
Parameters that the optimizer must see whole are `whole.py`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroengine.offload.home import Home, at_hand
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.edits import fingerprint
from zeroengine.zero.experts import is_stack, mark_stack
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

    Masters and state live where the bucket's placement says: they are read and written inside `at_hand` only.
    """

    def __init__(self, gradients: BucketGradients, master: Tensor | None, cut: bool) -> None:
        """`cut`: where this rank updates everything, parameters are cut at the borders of the ranks' slices. torch's fused
        loops round the last few elements of a tensor differently, and the stages must agree to the last bit."""
        self.gradients = gradients
        self.bucket: Bucket = gradients.bucket
        bucket = self.bucket
        held = bucket.shard if bucket.policy.shard_state else bucket.full
        self._values: Tensor = held if held is not None else bucket.shard
        self.separate = master is not None
        self.flat: Tensor = self._values if master is None else master
        self.home: Home = bucket.placement.state(bucket.index)
        self._published = self._fingerprint()
        self.parts: dict[int, list[Part]] = {}
        self.apart: frozenset[int] = frozenset()
        for index, start, end, at in self._ranges(cut):
            spec = bucket.layout.specs[index]
            self._add(index, Part(spec.name, spec.shape, start, at, nn.Parameter(self.flat[at : at + end - start].detach())))

    def _add(self, index: int, part: Part) -> None:
        self.parts.setdefault(index, []).append(part)
        (self.home if self.separate else self.bucket.home).alias(part.view, self.flat, part.at * self.flat.element_size())

    def at_hand(self, *, changed: bool) -> contextlib.AbstractContextManager[None]:
        """Context in which masters, state and values of the range have their values in memory. Raises `OffloadError`."""
        return at_hand(self.home, self.bucket.home, changed=changed)

    def owns_state(self, state: Callable[[nn.Parameter], Iterable[Tensor]]) -> None:
        """`state` gives the tensors that the optimizer keeps for a part: they live with the masters from now on."""

        def members() -> Iterator[Tensor]:
            if self.separate:
                yield self.flat
            for parts in self.parts.values():
                for part in parts:
                    yield from state(part.view)

        self.home.owns(members)

    @property
    def away(self) -> bool:
        """Masters or state leave memory between steps, or are updated by another processor than that of the values."""
        return not (self.home.in_memory and self.bucket.home.in_memory) or self.flat.device != self.bucket.device

    def _ranges(self, cut: bool) -> Iterator[tuple[int, int, int, int]]:
        """(parameter, start, end, position in `flat`). Not cut for so many ranks that it would cost time."""
        layout, policy = self.bucket.layout, self.bucket.policy
        if policy.shard_state:
            own = self.bucket.own
            for s in layout.segments(own.start, own.stop):
                yield s.index, s.start, s.end, s.at
            return
        cut = cut and layout.shards <= _CUT_RANKS
        cuts = [layout.slice_of(r) for r in range(layout.shards)] if cut else [(0, layout.padded)]
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
            mark_stack(view, is_stack(self.bucket.params[index]))
            del self.parts[index]
            self._add(index, Part(spec.name, spec.shape, 0, spec.offset, view))

    def _flat_parts(self, used: frozenset[str], copied: Tensor | None) -> Iterator[tuple[Part, Tensor]]:
        """The parts that are updated here and have a gradient in this step, with it: its view in the reduced gradients, or in
        the copy `copied` of them."""
        reduced = self.gradients.updated if copied is None else copied
        for index, parts in self.parts.items():
            for part in parts if index not in self.apart else ():
                if part.name in used:
                    grad = reduced[part.at : part.at + part.view.numel()]
                    yield part, grad if part.view.dim() == 1 else grad.view(part.view.shape)

    def link(self, used: frozenset[str], reduced: Tensor | None = None) -> None:
        """Points `.grad` of the parts at the reduced gradients; parts of unused parameters have none, as in torch."""
        for part, grad in self._flat_parts(used, reduced):
            part.view.grad = grad if grad.dtype is part.view.dtype else grad.to(part.view.dtype)

    def feed(self, used: frozenset[str], grads: dict[Tensor, Tensor], copies: dict[Tensor, Tensor], reduced: Tensor | None = None) -> None:
        """`link` for an optimizer that takes gradients of any type, and writes the values in the pass that makes them."""
        for part, grad in self._flat_parts(used, reduced):
            grads[part.view] = grad
            if self.separate and self._values.device == self.flat.device:
                copies[part.view] = self._values[part.at : part.at + grad.numel()].view(grad.shape)

    def views(self) -> list[nn.Parameter]:
        """What the optimizer knows the flat parts by."""
        return [part.view for index, parts in self.parts.items() if index not in self.apart for part in parts]

    def repoint(self) -> None:
        """The parts are views of `flat`, whose memory was exchanged."""
        for parts in self.parts.values():
            for part in parts:
                part.view.data = self.flat.data[part.at : part.at + part.view.numel()].view(part.view.shape)

    def unlink(self) -> None:
        for parts in self.parts.values():
            for part in parts:
                part.view.grad = None

    def publish(self, written: bool) -> None:
        """Issues what brings the new values to the other ranks; the optimizer may have `written` them from the masters
        already (`feed`)."""
        self.settle(written)
        self.announce()

    def settle(self, written: bool) -> None:
        """The part of `publish` that this rank does by itself."""
        if self.separate and not (written and self._values.device == self.flat.device):
            self._bring_over()
        self._published = self._fingerprint()

    def announce(self) -> None:
        """The part of `publish` that is collective, where values are kept whole."""
        if self.bucket.policy.shard_state:
            self.bucket.publish()
        else:
            self.bucket.count_update()

    def _bring_over(self) -> None:
        """The values become those of the masters."""
        if self._values.device == self.flat.device:
            self._values.copy_(self.flat)
        else:  # rounded on the host: fewer bytes to move
            self.bucket.placement.link.up(self.flat.to(self._values.dtype), self._values)

    def refresh(self) -> None:
        """Makes the master follow the values where they changed (weights were loaded or edited); elsewhere it keeps its
        precision."""
        if self.separate:
            with self.at_hand(changed=True):
                values = self._values.to(self.flat.device)
                changed = self.flat.to(values.dtype) != values
                self.flat.copy_(torch.where(changed, values.to(self.flat.dtype), self.flat))
            self._published = self._fingerprint()

    def drifted(self) -> bool:
        """The values are not those that this master published: somebody wrote into the parameters."""
        return self._published != self._fingerprint()

    def _fingerprint(self) -> int:
        """0 where users cannot reach the values, or the values are the master."""
        reachable = self.separate and not self.bucket.policy.shard_params
        return fingerprint(self._values) if reachable else 0

    def pieces(self) -> Iterator[tuple[nn.Parameter, Piece]]:
        """Every part as a `Piece` of its parameter's master values."""
        for parts in self.parts.values():
            for part in parts:
                yield part.view, Piece(part.name, part.shape, part.start, part.view.data.view(-1))
