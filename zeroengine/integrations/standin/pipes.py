"""`deepspeed.pipe` with the arguments that scripts give it."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from zeroengine.errors import ConfigError
from zeroengine.logging import log_once
from zeroengine.pipeline import module as ours
from zeroengine.pipeline.partition import PartitionMethod


class ProcessTopology:
    """Ranks on a grid of named `axes`, of which the last changes fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims):
            raise ConfigError(f"ProcessTopology: {len(axes)} axes and {len(dims)} dims")
        self.axes, self.dims = list(axes), list(dims)
        make: Any = namedtuple
        self.ProcessCoord = make("ProcessCoord", self.axes)
        self.mapping = {self.ProcessCoord(*at): rank for rank, at in enumerate(itertools.product(*map(range, self.dims)))}

    def get_rank(self, **coordinates: int) -> int:
        """The rank at a place; every axis must be given."""
        if set(coordinates) != set(self.axes):
            raise ConfigError(f"ProcessTopology.get_rank takes {self.axes}, not {list(coordinates)}")
        return self.mapping[self.ProcessCoord(**coordinates)]

    def get_coord(self, rank: int) -> Any:
        """The place of a rank, by names of axes."""
        return next(at for at, found in self.mapping.items() if found == rank)

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Size of an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def filter_match(self, **coordinates: int) -> list[int]:
        """Ranks at these coordinates."""
        wanted = coordinates.items()
        return [rank for at, rank in self.mapping.items() if all(getattr(at, axis) == i for axis, i in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks with number `idx` along `axis`."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Lists of ranks that differ along `axis` only."""
        if axis not in self.axes:
            return []
        others = [a for a in self.axes if a != axis]
        places = itertools.product(*(range(self.get_dim(a)) for a in others))
        return [self.filter_match(**dict(zip(others, at, strict=True))) for at in places]

    def world_size(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineModule(ours.PipelineModule):
    """`zeroengine.pipe.PipelineModule` with DeepSpeed's arguments, in their order, and its defaults; `others` are ours."""

    def __init__(
        self, layers: Sequence[Any], num_stages: int | None = None, topology: ProcessTopology | None = None,
        loss_fn: ours.LossFunction | None = None, seed_layers: bool = False, seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234, partition_method: PartitionMethod = "parameters", activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None, checkpointable_layers: Sequence[str] | None = None, dynamic_shape: bool = False,
        **others: Any,
    ) -> None:  # fmt: skip
        stages = _stages(num_stages, topology)
        if seed_fn is not None and seed_layers:
            raise ConfigError("PipelineModule(seed_fn=...): seed_layers begins each layer with torch.manual_seed(base_seed + its index)")
        if activation_checkpoint_interval and (activation_checkpoint_func is not None or checkpointable_layers is not None):
            log_once(
                "PipelineModule: activation_checkpoint_func and checkpointable_layers have no effect: every "
                "activation_checkpoint_interval layers run again in backward, by torch's non-reentrant checkpointing"
            )
        super().__init__(
            list(layers), stages, loss_fn, partition_method=partition_method, seed_layers=seed_layers, base_seed=base_seed,
            activation_checkpoint_interval=activation_checkpoint_interval, **others,
        )  # fmt: skip
        self._topology = topology

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def topology(self) -> ProcessTopology | None:
        """What the module was made with."""
        return self._topology


def _stages(num_stages: int | None, topology: ProcessTopology | None) -> int:
    if topology is None:
        if num_stages is None:
            raise ConfigError("PipelineModule needs num_stages or a topology")
        return num_stages
    if topology.get_axis_names()[:1] != ["pipe"] or topology.get_dim("model") > 1:
        raise ConfigError(
            f"PipelineModule(topology=...): the axes are {topology.get_axis_names()} of sizes {topology.dims}; here `pipe` is the "
            "outermost, and ranks that share layers are asked for with `mesh.tp` in the configuration: give num_stages"
        )
    return topology.get_dim("pipe")
