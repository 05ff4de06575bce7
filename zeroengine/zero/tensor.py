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
    have the parts."""

    dim: int
    size: int
    rank: int
    sections: int = 1
    comm: Communicator | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def over(comm: Communicator, dim: int, sections: int = 1) -> TensorShard:
        """This rank's part, where the ranks of `comm` have one each."""
        return TensorShard(dim, comm.size, comm.rank, sections, comm)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part, contiguous."""
        parts = [s.chunk(self.size, self.dim)[self.rank] for s in whole.chunk(self.sections, self.dim)]
        return torch.cat(parts, self.dim).contiguous()

    def cut_state(self, state: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
        """What an optimizer keeps for a whole parameter whose parts have `shape`, for this part of it."""
        whole = self.whole_shape(shape)
        return {k: self.cut(v) if isinstance(v, Tensor) and v.shape == whole else v for k, v in state.items()}

    def whole_shape(self, shape: Sequence[int]) -> torch.Size:
        """Shape of the whole of which a part has `shape`."""
        return torch.Size([n * self.size if d == self.dim else n for d, n in enumerate(shape)])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole out of all ranks' parts."""
        cut = [p.chunk(self.sections, self.dim) for p in parts]
        return torch.cat([p[s] for s in range(self.sections) for p in cut], self.dim)

    def gather(self, part: Tensor, subject: str) -> Tensor:
        """The whole out of this rank's `part` and those of the others. Collective over `comm`."""
        if self.comm is None:
            raise ValueError(f"{subject}: this part does not know the ranks that have the others")
        full = torch.empty(self.size * part.numel(), dtype=part.dtype, device=part.device)
        self.comm.all_gather(full, part.detach().contiguous().view(-1), subject).wait()
        return self.join(list(full.view(self.size, *part.shape)))


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
        whole = (*offsets[: shard.dim], start, *offsets[shard.dim + 1 :])
        yield whole, box.narrow(shard.dim, at - offsets[shard.dim], stop - at)
        at = stop
