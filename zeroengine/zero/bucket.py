"""A bucket: parameters laid into one flat buffer, this rank's slice of it, and who holds the values now."""

from __future__ import annotations

import enum

import torch
from torch import Tensor, nn

from zeroengine.comm.protocol import Communicator, Work
from zeroengine.zero.layout import BucketLayout
from zeroengine.zero.policy import Policy
from zeroengine.zero.pool import BufferPool
from zeroengine.zero.residency import Slot, hide, show


class Residency(enum.Enum):
    RELEASED = "released"  # only `shard` exists
    GATHERING = "gathering"  # an all-gather into `full` was issued
    WHOLE = "whole"  # parameters are views into `full`


class Bucket:
    """Parameters of one dtype under one `Policy`.

    `full` has `layout.padded` elements while values are whole, else None. `shard` is this rank's slice: a view into
    `full` where the policy keeps values whole, else the only copy. `pins` counts the users that forbid releasing;
    `version` the updates of the values, so that backward notices weights that changed since forward.
    """

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        params: list[nn.Parameter],
        dtype: torch.dtype,
        policy: Policy,
        comm: Communicator,
        pool: BufferPool,
    ) -> None:
        self.index = index
        self.layout = layout
        self.params = params
        self.dtype = dtype
        self.device = params[0].device
        self.policy = policy
        self.trainable = params[0].requires_grad
        self.full: Tensor | None = None
        self.shard: Tensor = torch.empty(0, dtype=dtype, device=self.device)
        self.residency = Residency.RELEASED
        self.pins = 0
        self.version = 0
        self.comm = comm
        self._pool = pool
        self._work: Work | None = None
        names = [spec.name for spec in layout.specs]
        self.subject = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} parameters)"
        for i, (p, spec) in enumerate(zip(params, layout.specs, strict=True)):
            p._zero = Slot(spec.name, self, i, type(p))  # type: ignore[attr-defined]

    @property
    def own(self) -> slice:
        """This rank's slice of the flat buffer."""
        return slice(*self.layout.slice_of(self.comm.rank))

    def adopt(self, full: Tensor) -> None:
        """Takes the initial values: `full` is flat, padded, equal on all ranks. Where the policy keeps values whole it
        becomes the bucket's own, and should be memory of the communicator."""
        if self.policy.shard_params:
            self.shard = self.comm.empty(self.layout.shard_numel, full).copy_(full[self.own])
            hide(self.params)
        else:
            self.full, self.shard = full, full[self.own]
            self._show()

    def gather(self) -> None:
        """Issues the all-gather if the values are released."""
        if self.residency is Residency.RELEASED:
            self.full = self._pool.take(self.layout.padded, self.dtype, self.device)
            self._work = self.comm.all_gather(self.full, self.shard, self.subject)
            self.residency = Residency.GATHERING

    def publish(self) -> None:
        """The slices changed: issues the all-gather of values that are kept whole; a sharded bucket only counts the change."""
        self.version += 1
        if self.full is not None and not self.policy.shard_params:
            self._work = self.comm.all_gather(self.full, self.shard, self.subject)

    def wait(self) -> None:
        """Completes what was issued; afterwards parameters of a gathered bucket have their values."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self.residency is Residency.GATHERING:
            self._show()

    def release(self) -> None:
        """Drops the whole values. Views that somebody else still holds stay valid: nothing is resized."""
        if not self.policy.shard_params or self.residency is Residency.RELEASED:
            return
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self.residency is Residency.WHOLE:
            hide(self.params)
        full, self.full = self.full, None
        self.residency = Residency.RELEASED
        if full is not None:
            self._pool.give(full)

    def holds(self, index: int) -> bool:
        """Whether parameter `index` lies where the layout says, as far as values are whole between uses."""
        if self.policy.shard_params or self.full is None:
            return True
        at = self.full.data_ptr() + self.layout.specs[index].offset * self.full.element_size()
        return self.params[index].data_ptr() == at

    def views(self, flat: Tensor) -> list[Tensor]:
        """Tensors of the parameters' shapes in a flat buffer laid out like this bucket."""
        return [flat[s.offset : s.end].view(s.shape) for s in self.layout.specs]

    def detach(self) -> None:
        """Gives every parameter memory of its own again and forgets them (collective if values are sharded)."""
        self.gather()
        self.wait()
        if self.full is not None:
            for p, values in zip(self.params, self.views(self.full), strict=True):
                p.__class__ = p._zero.cls  # type: ignore[attr-defined]
                p.data = values.clone()
                del p._zero  # type: ignore[attr-defined]
        self.full = None
        self.shard = torch.empty(0, dtype=self.dtype)

    def _show(self) -> None:
        if self.full is not None:
            show(self.params, self.views(self.full))
        self.residency = Residency.WHOLE


_ALIGN = 4  # a cut between blocks is taken once a bucket has 1/_ALIGN of the target


def block_prefix(name: str) -> str:
    """Path up to the first number ("h.3.attn.weight" -> "h.3"): parameters of one repeated block share it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def cut_into_buckets(named_sizes: list[tuple[str, int]], target: int) -> list[list[int]]:
    """Groups consecutive parameters (name, elements) into buckets of at most `target` elements (or one parameter),
    preferring the borders of repeated blocks. Returns index lists."""
    groups: list[list[int]] = []
    filled = 0
    for i, (name, size) in enumerate(named_sizes):
        new_block = i > 0 and block_prefix(name) != block_prefix(named_sizes[i - 1][0])
        if not groups or filled + size > target or (new_block and filled * _ALIGN >= target):
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += size
    return groups
