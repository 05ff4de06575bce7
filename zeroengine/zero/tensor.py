"""Which part of a parameter a rank of a tensor group holds. The mechanism shards that part like any parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator

_ATTRIBUTE = "_zero_tensor"


@dataclass(frozen=True)
class TensorShard:
    """Part `rank` of `size` along `dim`; with `sections` (a fused q, k, v) that part of each of them. `comm`: the ranks that
    have the parts. What these make up may itself be a part, `outer`, of the whole (experts that ranks share, and whose layers
    others split)."""

    dim: int
    size: int
    rank: int
    sections: int = 1
    comm: Communicator | None = field(default=None, compare=False, repr=False)
    outer: TensorShard | None = None

    @staticmethod
    def over(comm: Communicator, dim: int, sections: int = 1, outer: TensorShard | None = None) -> TensorShard:
        """This rank's part, where the ranks of `comm` have one each."""
        return TensorShard(dim, comm.size, comm.rank, sections, comm, outer)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part, contiguous."""
        whole = whole if self.outer is None else self.outer.cut(whole)
        parts = [s.chunk(self.size, self.dim)[self.rank] for s in whole.chunk(self.sections, self.dim)]
        return torch.cat(parts, self.dim).contiguous()

    def cut_state(self, state: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
        """What an optimizer keeps for a whole parameter whose parts have `shape`, for this part of it."""
        whole = self.whole_shape(shape)
        return {k: self.cut(v) if isinstance(v, Tensor) and v.shape == whole else v for k, v in state.items()}

    def whole_shape(self, shape: Sequence[int]) -> torch.Size:
        """Shape of the whole of which a part has `shape`."""
        joined = self.joined_shape(shape)
        return joined if self.outer is None else self.outer.whole_shape(joined)

    def joined_shape(self, shape: Sequence[int]) -> torch.Size:
        """Shape of what the parts of `shape` make up, the whole or its part `outer`."""
        return torch.Size([n * self.size if d == self.dim else n for d, n in enumerate(shape)])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """What all ranks' parts make up, the whole or its part `outer`."""
        cut = [p.chunk(self.sections, self.dim) for p in parts]
        return torch.cat([p[s] for s in range(self.sections) for p in cut], self.dim)

    def gather(self, part: Tensor, subject: str) -> Tensor:
        """The whole out of this rank's `part` and those of the others. Collective over `comm`, and then over that of `outer`."""
        if self.comm is None:
            raise ValueError(f"{subject}: this part does not know the ranks that have the others")
        full = torch.empty(self.size * part.numel(), dtype=part.dtype, device=part.device)
        self.comm.all_gather(full, part.detach().contiguous().view(-1), subject).wait()
        joined = self.join(list(full.view(self.size, *part.shape)))
        return joined if self.outer is None else self.outer.gather(joined, subject)


def mark_tensor_shard(param: Tensor, shard: TensorShard | None) -> None:
    if shard is not None:
        setattr(param, _ATTRIBUTE, shard)
    elif hasattr(param, _ATTRIBUTE):
        delattr(param, _ATTRIBUTE)


def tensor_shard(param: Tensor) -> TensorShard | None:
    """None for a parameter that the ranks of a tensor group hold whole, and equal."""
    return getattr(param, _ATTRIBUTE, None)


def whole_value(param: Tensor, value: Tensor, subject: str) -> Tensor:
    """`value`, which belongs to `param` here, for the whole parameter: the same object where `param` is no part. Collective over
    the tensor group."""
    shard = tensor_shard(param)
    return value if shard is None else shard.gather(value, subject)


def whole_shape(param: Tensor) -> torch.Size:
    """Shape of the whole parameter of which `param` may be a part."""
    shard = tensor_shard(param)
    return param.shape if shard is None else shard.whole_shape(param.shape)


def place(shard: TensorShard, shape: Sequence[int], offsets: Sequence[int], box: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Where a box at `offsets` of a part of `shape` lies in the whole: (offsets in the whole, the box or a part of it)."""
    part = shape[shard.dim] // shard.sections  # of one section
    at, end = offsets[shard.dim], offsets[shard.dim] + box.shape[shard.dim]
    while at < end:
        section, inside = divmod(at, part)
        stop = min(end, (section + 1) * part)
        start = section * part * shard.size + shard.rank * part + inside
        there = (*offsets[: shard.dim], start, *offsets[shard.dim + 1 :])
        held = box.narrow(shard.dim, at - offsets[shard.dim], stop - at)
        if shard.outer is None:
            yield there, held
        else:
            yield from place(shard.outer, shard.joined_shape(shape), there, held)
        at = stop
