"""What ranks that share layers decide together about a step: the norm, and what made it non-finite."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError
from zeroengine.ops.flat import squares
from zeroengine.optim.clip import first_bad, first_told, of_one_whole, root
from zeroengine.optim.kinds import is_elementwise
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.zero.experts import expert_part
from zeroengine.zero.gradients import BucketGradients
from zeroengine.zero.tensor import tensor_shard


class AcrossLayers:
    """The `NormRule` of a `ZeroOptimizer` whose parameters are parts of whole ones, or held whole and equal, on the ranks of a tensor
    group. `control`: the ranks that reduce gradients together; `shard_ranks`: those of them whose slices make up one whole;
    `tensor`: control over the tensor group."""

    def __init__(self, control: Communicator, shard_ranks: tuple[int, ...], tensor: Communicator) -> None:
        self._control, self._shard_ranks, self._tensor = control, shard_ranks, tensor

    def norm(self, gradients: list[BucketGradients]) -> float:
        """2-norm before clipping: parts add up, and what every rank holds counts once. Collective."""
        mine = layer_squares(gradients, self._control, self._shard_ranks)
        return root(float(over_layers(mine, self._tensor).sum()))

    def blame(self, gradients: list[BucketGradients]) -> str | None:
        """Names the parameter, also where only another rank's part of it is bad. Collective."""
        return first_told(self._tensor, first_bad(gradients, self._control))


def layer_squares(gradients: list[BucketGradients], control: Communicator, shard_ranks: tuple[int, ...]) -> Tensor:
    """Sums of squares over the ranks of a shard group, fp64 [2]: of parts of whole parameters, and of whole ones. Collective over
    `control`."""
    values: list[Tensor] = []
    kinds: list[int] = []  # 0: a part, 1: whole
    for g in gradients:
        reduced = g.reduced
        for s in g.bucket.layout.segments(g.bucket.own.start, g.bucket.own.stop):
            piece = reduced[s.at : s.at + s.end - s.start]
            values.append(torch.view_as_real(piece) if piece.is_complex() else piece)
            kinds.append(int(not _is_cut(g.bucket.params[s.index])))
    sums = torch.zeros(2, dtype=torch.float64)
    sums.index_add_(0, torch.tensor(kinds, dtype=torch.int64), squares(values)[0].cpu())
    return of_one_whole(control.exchange(sums, "squares of the gradients"), control, shard_ranks).sum(0)


def over_layers(sums: Tensor, tensor: Communicator) -> Tensor:
    """What `layer_squares` gave each rank of a tensor group (control), as that of all: parts add up, and what every rank holds
    counts once. Collective."""
    over = tensor.exchange(sums, "squares of the gradients of shared layers")
    # what all hold has the same squares, unless it is not finite on one of them alone: then nobody may step
    return torch.stack([over[:, 0].sum(), over[:, 1].amax()])


def step_over_layers(optimizer: ZeroOptimizer, shard_ranks: tuple[int, ...], tensor: Communicator) -> None:
    """Makes the ranks of `tensor` (control) clip and skip as one.

    Raises `ConfigError` for an optimizer that would see a part of a parameter where it must see the whole.
    """
    check_elementwise(optimizer)
    optimizer.norm_rule = AcrossLayers(optimizer.control, shard_ranks, tensor)


def _is_cut(param: Tensor) -> bool:
    """Whether the ranks of the tensor group have a part of it each. Which of all experts it has is the same on all of them."""
    part, shard = expert_part(param), tensor_shard(param)
    if part is not None and part.stacked and shard is not None:
        shard = shard.outer
    return shard is not None


def check_elementwise(optimizer: ZeroOptimizer) -> None:
    """Raises `ConfigError` for an optimizer that would see a part of a parameter where it must see the whole."""
    inner = optimizer.optimizer
    apart = {id(p) for g in inner.param_groups if not is_elementwise(type(inner), g) for p in g["params"]}
    for master in optimizer.masters:
        for index, spec in enumerate(master.bucket.layout.specs):
            cut = _is_cut(master.bucket.params[index])
            if cut and (index in master.apart or any(id(part.view) in apart for part in master.parts.get(index, []))):
                raise ConfigError(
                    f"optimizer {type(inner).__name__} looks at whole parameters, and mesh.tp gives each rank a part of "
                    f"'{spec.name}'; set mesh.tp to 1, or use an optimizer that updates each element by itself (Adam, AdamW, SGD, ...)"
                )
