"""`PipelineModule`: a model as a list of layers, of which each rank has those of its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroengine.errors import ModelError
from zeroengine.offload.inputs import recomputed
from zeroengine.parallel.segments import Segment
from zeroengine.pipeline.layers import (
    FunctionLayer,
    LayerSpec,
    Tie,
    TiedLayer,
    TiedLayerSpec,
    check_owners,
    count_parameters,
    share,
    tied_name,
)
from zeroengine.pipeline.partition import PartitionMethod, balanced, layer_weights
from zeroengine.pipeline.schedules import ScheduleRule, find_rule
from zeroengine.zero.hooks import recomputes
from zeroengine.zero.residency import slot_of

LossFunction = Callable[[Any, Any], Tensor]
LossWeight = Callable[[Any], Any]


def pipeline_rank(ranks: int) -> int:
    """This process' place among `ranks` pipeline ranks: the pipeline is the outermost dimension of the mesh."""
    if ranks == 1:
        return 0
    if not dist.is_initialized():
        raise ModelError(f"a PipelineModule of {ranks} stages needs the job's ranks: call zeroengine.init_distributed() first")
    world = dist.get_world_size()
    if world % ranks:
        raise ModelError(f"num_stages={ranks} does not divide the {world} ranks of the job; give a divisor (mesh.pp is the same number)")
    return dist.get_rank() // (world // ranks)


def _inside_init() -> bool:
    """Whether parameters are cut over all ranks as they are built (`zero.Init`)."""
    probe = nn.Module()
    probe.register_parameter("probe", nn.Parameter(torch.empty(1)))
    return slot_of(probe.get_parameter("probe")) is not None


class PipelineModule(nn.Module):
    """A model cut into stages.

    `layers`: `LayerSpec`s, modules and functions, each called with the output of the one before; the first with the inputs of a
    batch `(inputs, labels)`. `num_stages`: ranks of the pipeline. `loss_fn(output, labels)` is the mean loss of a micro-batch.
    `loss_weight(labels)`: how many tokens (or samples) that mean is over; with it the loss of a step is the mean over
    all tokens of all micro-batches and ranks, without it every micro-batch counts the same.
    `schedule`: a name, "package.module:function" or a `ScheduleRule`; `virtual_stages`: stages on each rank.
    `partition_method`: uniform, parameters, type:<regex>, or the measured time of each layer.
    `seed_layers`: a layer made from a spec starts from seed `base_seed` + its index, so the split does not change the model.
    `dropout_seed`: random numbers of a layer depend on it, the step, the micro-batch and the layer only.
    `activation_checkpoint_interval`: recompute so many layers at a time in backward, which is then made in one part whatever the
    schedule; 0 keeps activations.
    `stage_rank`: whose stages to build, for a plan; None: this process'.
    """

    def __init__(
        self, layers: Sequence[Any], num_stages: int = 1, loss_fn: LossFunction | None = None, *,
        partition_method: PartitionMethod = "parameters", schedule: str | ScheduleRule = "1f1b",
        virtual_stages: int | None = None, loss_weight: LossWeight | None = None, seed_layers: bool = True,
        base_seed: int = 1234, dropout_seed: int | None = None, activation_checkpoint_interval: int = 0,
        stage_rank: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_stages > 1 and _inside_init():
            raise ModelError(
                "PipelineModule: zeroengine.zero.Init cuts what all ranks build, and every stage builds layers of its own; build the "
                "module outside of it, a rank has its own stages' layers only"
            )
        self._configure(num_stages, schedule, virtual_stages, loss_fn, loss_weight, stage_rank)
        self.dropout_seed = dropout_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        names = [s.name if isinstance(s, LayerSpec) else type(s).__name__ for s in layers]
        weights = layer_weights(partition_method, names, lambda: [count_parameters(s) for s in layers])
        self.parts = balanced(weights, len(self.placement))
        check_owners(layers, self.stage_of_layer, loss_fn)
        self.tied = nn.Module()
        self.layers = nn.ModuleDict()
        for stage in self.local_stages:
            for i in range(self.parts[stage], self.parts[stage + 1]):
                self.layers[str(i)] = self._build(layers[i], i, base_seed if seed_layers else None)
        self.ties = self._tie(layers)

    def _configure(
        self, num_stages: int, schedule: str | ScheduleRule, virtual_stages: int | None, loss_fn: LossFunction | None,
        loss_weight: LossWeight | None, stage_rank: int | None = None,
    ) -> None:  # fmt: skip
        self.num_stages = num_stages
        self.schedule_rule = find_rule(schedule)
        self.virtual_stages = self.schedule_rule.default_chunks if virtual_stages is None else virtual_stages
        self.placement = self.schedule_rule.place(num_stages, self.virtual_stages)
        self.stage_rank = pipeline_rank(num_stages) if stage_rank is None else stage_rank
        here = self.stage_rank == self.placement[-1] or not isinstance(loss_fn, nn.Module)
        self.loss_fn = loss_fn if here else None  # one with weights of its own belongs to the last stage
        self.loss_weight = loss_weight
        self.draw = 0  # set by the engine for each step
        self.split_layers, self.split_rank = range(0), 0  # layers on a split sequence, and which part this rank has
        self.splits_tokens = False  # a tensor group splits sequences
        self.split_tokens = 0  # then, of the whole sequence; set by the engine before each stage but the first

    @property
    def local_stages(self) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.placement) if r == self.stage_rank)

    @property
    def recomputes(self) -> bool:
        """Whether layers of this rank's stages keep no activations and run again in backward."""
        return self.activation_checkpoint_interval > 0 or recomputes(self)

    @property
    def state_names_ties(self) -> bool:
        """Whether a state_dict lists tied weights under the names of their ties as well."""
        return True

    def saved_name(self, name: str) -> str:
        """The name in a checkpoint: it must not depend on where the model is cut. Every rank knows it for all tied weights."""
        return name

    def part_of(self, name: str) -> str:
        """What a parameter is reduced with: its stage, or its tie."""
        pieces = name.split(".")
        if pieces[0] == "tied":
            return f"tied.{pieces[1]}"
        if pieces[0] == "loss_fn":
            return f"stage {len(self.placement) - 1}"
        return f"stage {self.stage_of_layer(int(pieces[1]))}"

    def stage_of_layer(self, index: int) -> int:
        return next(s for s in range(len(self.placement)) if index < self.parts[s + 1])

    def ranks_of(self, tie: Tie) -> list[int]:
        """The pipeline ranks that share a tied weight, its owner's first."""
        return list(dict.fromkeys(self.placement[s] for s in tie.stages))

    def segments(self, plan: Collection[str]) -> list[Segment]:
        """The runs of this rank's layers on a sequence that a tensor group has split: from the first layer of the model that has
        split parts to the last one. `plan`: names of the split modules of all stages."""
        held = [int(name.split(".")[1]) for name in plan if name.startswith("layers.")]
        if not held:
            return []
        self.split_layers = range(min(held), max(held) + 1)
        for name in (use for tie in self.ties for uses in tie.uses for use in uses):
            if int(name.split(".")[1]) in self.split_layers:
                raise ModelError(
                    f"tensor_parallel.sequence_parallel: the tied weight '{name}' lies among the layers {min(held)} to {max(held)}, "
                    "on the split sequence; set it to false"
                )
        found = []
        for stage in self.local_stages:
            mine = [i for i in range(self.parts[stage], self.parts[stage + 1]) if i in self.split_layers]
            if mine:
                layers = tuple(self.layers[str(i)] for i in mine)
                found.append(Segment(layers, splits=min(held) in mine, joins=max(held) in mine))
        return found

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """(inputs of the first stage, labels of the last)."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        raise ModelError(f"a batch for a PipelineModule is (inputs, labels), not {type(batch).__name__}")

    def loss(self, output: Any, labels: Any) -> Tensor:
        """The scalar loss of a micro-batch."""
        return self.loss_fn(output, labels) if self.loss_fn is not None else output

    def forward(self, x: Any, stage: int | None = None, micro: int = 0) -> Any:
        """Runs one local stage, or all stages where this rank has them all."""
        if stage is not None:
            return self._run_stage(x, stage, micro)
        if len(self.local_stages) != len(self.placement):
            raise ModelError(f"pipeline rank {self.stage_rank} has stages {self.local_stages} only; run the model by engine.train_batch")
        for s in self.local_stages:
            x = self._run_stage(x, s, micro)
        return x

    def _run_stage(self, x: Any, stage: int, micro: int) -> Any:
        start, end = self.parts[stage], self.parts[stage + 1]
        each = self.activation_checkpoint_interval
        if each <= 0 or not torch.is_grad_enabled():
            return self._run_layers(x, start, end, micro)
        for first in range(start, end, each):
            last = min(first + each, end)
            x = recomputed(self._run_layers, x, first, last, micro)
        return x

    def _run_layers(self, x: Any, start: int, end: int, micro: int) -> Any:
        for i in range(start, end):
            with self._seeded(i, micro):
                x = self.layers[str(i)](x)
        return x

    @contextlib.contextmanager
    def _seeded(self, layer: int, micro: int) -> Iterator[None]:
        if self.dropout_seed is None or not self.training:
            yield
            return
        devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
        with torch.random.fork_rng(devices):
            own = (self.split_rank,) if layer in self.split_layers else ()  # ranks have other tokens
            torch.manual_seed(hash((self.dropout_seed, self.draw, micro, layer, *own)) & (2**63 - 1))
            yield

    def _build(self, spec: Any, index: int, seed: int | None) -> nn.Module:
        built = spec
        if isinstance(spec, LayerSpec):
            with torch.random.fork_rng(enabled=seed is not None):
                if seed is not None:
                    torch.manual_seed(seed + index)
                built = spec.build()
        if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
            return TiedLayer(built, spec.forward_fn)
        if not isinstance(built, nn.Module):
            if not callable(built):
                raise ModelError(f"layer {index} is a {type(built).__name__}: neither a module nor a function")
            return FunctionLayer(built)
        return built

    def _tie(self, layers: Sequence[Any]) -> tuple[Tie, ...]:
        """Shares tied parameters among the local layers; says which stages have which."""
        groups: dict[str, list[tuple[int, TiedLayerSpec]]] = {}
        for i, spec in enumerate(layers):
            if isinstance(spec, TiedLayerSpec):
                groups.setdefault(spec.key, []).append((i, spec))
        ties = []
        for key in sorted(groups):
            attributes = groups[key][0][1].attributes
            if any(set(spec.attributes) != set(attributes) for _, spec in groups[key]):
                raise ModelError(f"tied layers of key '{key}' tie different attributes")
            local = []
            for i, _ in groups[key]:
                if str(i) in self.layers:
                    layer = self.layers[str(i)]
                    local.append((f"layer {i}", layer.module if isinstance(layer, TiedLayer) else layer))
            if local:
                share(self.tied, key, attributes, local)
            names = tuple(tied_name(key, path) for path in attributes)
            stages = tuple(sorted({self.stage_of_layer(i) for i, _ in groups[key]}))
            at = [f"layers.{i}.{'module.' if spec.forward_fn is not None else ''}" for i, spec in groups[key]]
            ties.append(Tie(key, names, stages, tuple(tuple(prefix + path for prefix in at) for path in attributes)))
        return tuple(ties)


def zero_of(output: Any) -> Tensor:
    """A loss of zero that still depends on `output`, for a micro-batch without any target."""
    parts = [t.float().sum() * 0.0 for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return sum(parts[1:], parts[0])
