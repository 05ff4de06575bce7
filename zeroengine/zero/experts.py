"""Which parameters belong to experts that only some ranks hold. They are sharded and reduced over the ranks that hold the same
ones; everything else about them is as for any parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator

_ATTRIBUTE = "_zero_expert"
_ELSEWHERE = "_zero_expert_elsewhere"
_STACK = "_zero_stack"


@dataclass(frozen=True)
class ExpertPart:
    """Of the `experts` of a layer, `size` ranks hold a part each, this one the part `rank`. `place`: name of the parameter within
    the layer's experts, the same on all ranks. `stacked`: the parameter is that part along dimension 0 of one over all
    experts, and has the same name on all ranks; else it is a whole parameter of one expert, with the expert's number in
    its name."""

    size: int
    rank: int
    experts: int
    place: str
    stacked: bool = True
    comm: Communicator | None = field(default=None, compare=False, repr=False)  # of the ranks that have the parts


def mark_expert(param: Tensor, part: ExpertPart | None) -> None:
    if part is not None:
        setattr(param, _ATTRIBUTE, part)
    elif hasattr(param, _ATTRIBUTE):
        delattr(param, _ATTRIBUTE)


def common_name(name: str, param: Tensor) -> str:
    """`name` of a parameter as all ranks can say it: experts are numbered within this rank's part."""
    part = expert_part(param)
    if part is None or part.stacked:
        return name
    inner = part.place.partition(".")[2]
    return f"{name.removesuffix('.' + inner).rpartition('.')[0]}.{part.place}"


def of_all_ranks(param: Tensor, value: Tensor) -> Tensor:
    """`value`, which belongs to `param` of an expert of a list here, with those of the other ranks' experts of the same place:
    stacked by rank. Collective over the ranks that share the experts."""
    part = expert_part(param)
    if part is None or part.comm is None:
        raise ValueError("the parameter belongs to no expert that ranks share")
    full = torch.empty(part.size * value.numel(), dtype=value.dtype, device=value.device)
    part.comm.all_gather(full, value.detach().contiguous().view(-1), f"all experts' {part.place}").wait()
    return full.view(part.size, *value.shape)


def by_name(param: Tensor, name: str, value: Tensor) -> dict[str, Tensor]:
    """`value` of `param` under its `name`; of an expert of a list with those of the other ranks' experts, under theirs. Collective
    over the ranks that share the experts."""
    names = names_of(param, name)
    return {name: value} if len(names) == 1 else dict(zip(names, of_all_ranks(param, value), strict=True))


def names_of(param: Tensor, name: str) -> list[str]:
    """`name` of `param`; of an expert of a list those of all ranks' experts of the same place, by rank."""
    part = expert_part(param)
    if part is None or part.stacked:
        return [name]
    at, _, inner = part.place.partition(".")
    head = name.removesuffix(f".{inner}").rpartition(".")[0]
    each = part.experts // part.size
    return [f"{head}.{r * each + int(at)}.{inner}" for r in range(part.size)]


def mark_elsewhere(param: Tensor) -> None:
    """`param` belongs to an expert that another rank holds now."""
    setattr(param, _ELSEWHERE, True)


def is_elsewhere(param: Tensor) -> bool:
    return getattr(param, _ELSEWHERE, False) is True


def mark_stack(param: Tensor, stacked: bool = True) -> None:
    """`param` [experts, ...] has a parameter of each expert along dimension 0."""
    if stacked:
        setattr(param, _STACK, True)
    elif hasattr(param, _STACK):
        delattr(param, _STACK)


def is_stack(param: Tensor) -> bool:
    """Whether `param` is several experts' parameters in one tensor, which are independent of one another."""
    return getattr(param, _STACK, False) is True


def expert_part(param: Tensor) -> ExpertPart | None:
    """None for a parameter that all data-parallel ranks hold."""
    return getattr(param, _ATTRIBUTE, None)
