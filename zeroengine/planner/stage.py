"""One rank's part of a model, prepared as the engine prepares it: layers and experts shared, stages cut, buckets laid out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zeroengine.config import Config
from zeroengine.engine.accounting import BucketFacts
from zeroengine.engine.experts import groups_of, spread_experts
from zeroengine.engine.mechanism import gradient_rule, offload_rules, sharding_rule
from zeroengine.engine.parallel import share_layers, share_sequences
from zeroengine.engine.pipeline_sharing import share_stage_layers, share_stage_sequences
from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import logger
from zeroengine.mesh import Mesh
from zeroengine.moe.dispatch import Dispatcher, Route
from zeroengine.moe.group import ExpertGroup
from zeroengine.moe.grouped import grouped_linear
from zeroengine.moe.hf import SharedStackedExperts, convert, is_stacked_experts
from zeroengine.moe.plan import place_experts, slot_counts
from zeroengine.moe.router import Router
from zeroengine.moe.statistics import Statistics
from zeroengine.offload.placement import Places
from zeroengine.parallel.hf import SharedSequences
from zeroengine.parallel.stages import StageSharing
from zeroengine.pipeline.causal_lm import split_causal_lm
from zeroengine.pipeline.module import PipelineModule
from zeroengine.planner.model import ModelSource
from zeroengine.planner.paper import PaperFabric, paper_mesh
from zeroengine.zero.build import cast_buffers, lay_out


@dataclass(frozen=True)
class Shape:
    """How a model is cut, beside what the configuration says."""

    schedule: str = "1f1b"
    virtual_stages: int | None = None
    recompute: bool = False
    ranks: int = 1  # of the pipeline


@dataclass
class PaperRank:
    """What one rank holds. `module`: the model or its stages, of fake tensors."""

    rank: int
    module: nn.Module
    mesh: Mesh
    fabric: PaperFabric
    settings: Config
    sequences: SharedSequences | None = None
    sharing: StageSharing | None = None

    def facts(
        self, device: torch.device, accumulation: int, settings: Config | None = None, mesh: Mesh | None = None
    ) -> tuple[list[BucketFacts], int]:  # fmt: skip
        """The buckets as the engine would build them on `device` for steps of `accumulation` micro-batches, and the bytes of
        parameters in none. `settings` and `mesh`: others that share layers, experts and stages in the same way."""
        settings = settings if settings is not None else self.settings
        groups = groups_of(mesh if mesh is not None else self.mesh)
        rule = sharding_rule(settings)
        if isinstance(self.module, PipelineModule):
            rule = replace(rule, part=self.module.part_of)
        state, values = offload_rules(settings)
        placement = Places(device, state, values)
        moves = device.type != "cpu"
        found, loose = [], 0
        for laid in lay_out(self.module, rule, groups):
            if laid.layout is None:
                loose += sum(p.numel() for _, p in laid.named) * laid.dtype.itemsize
                continue
            policy, layout = laid.policy, laid.layout
            numel = layout.shard_numel if policy.shard_state else layout.padded
            away = laid.trainable and placement.moves_state(numel)
            there = policy.shard_params and placement.values_on_host
            found.append(
                BucketFacts(
                    layout=layout, dtype=laid.dtype, policy=policy, rank=laid.group.params.rank, replicas=laid.group.replicas.size,
                    rule=gradient_rule(settings, laid.dtype, groups.data_parallel_size) if laid.trainable else None,
                    accumulation=accumulation, kind=laid.group.params.name,
                    values_in_memory=not policy.shard_params or placement.keeps_values(layout.shard_numel),
                    state_in_memory=not (away and state.tier == "nvme"), apart=away and moves and not there,
                    values_on_host=there, state_on_host=away and moves,
                )
            )  # fmt: skip
        return found, loose


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the engine's messages about what it builds."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Workshop:
    """Builds `PaperRank`s, each of a model of its own."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source

    def ranks(self, settings: Config, world: int, shape: Shape, stages: Sequence[int] | None = None) -> list[PaperRank]:
        """The first data-parallel rank of each of these pipeline ranks (default: of all). Raises what `zeroengine.initialize`
        would refuse: `ConfigError`, `ModelError`."""
        mesh, _ = paper_mesh(settings, world, 0, shape.ranks)
        across = world // shape.ranks
        found = []
        with quiet():
            for place in range(shape.ranks) if stages is None else stages:
                found.append(self._rank(settings, world, place * across, place, shape))
        return found

    def _rank(self, settings: Config, world: int, rank: int, place: int, shape: Shape) -> PaperRank:
        mesh, fabric = paper_mesh(settings, world, rank, shape.ranks)
        source = self.source
        if shape.ranks > 1 and source.takes_stages:
            model = source.build(num_stages=shape.ranks, stage_rank=place, **_options(source, shape))
        else:
            model = source.build()
            if shape.recompute:
                recompute(model)
        sequences, sharing = None, None
        if shape.ranks > 1:
            stages = model if isinstance(model, PipelineModule) else self._split(model, shape, place)
            layers = share_stage_layers(stages, settings, mesh, mesh.everyone)
            stage_sequences = share_stage_sequences(stages, settings, mesh, trains=True)
            sharing = StageSharing(None if layers is None else layers.region, stage_sequences)
            spread_experts(stages, settings, mesh, groups_of(mesh), True, layers, stage_sequences)
            model = stages
        else:
            layers = share_layers(model, settings, mesh)
            sequences = share_sequences(model, settings, mesh, layers)
            spread_experts(model, settings, mesh, groups_of(mesh), False, layers, sequences)
        with source.fake:
            _cast(model, settings, mesh)
        return PaperRank(rank, model, mesh, fabric, settings, sequences, sharing)

    def _split(self, model: nn.Module, shape: Shape, place: int) -> PipelineModule:
        with self.source.fake:
            return split_model(model, shape, place)


def split_model(model: nn.Module, shape: Shape, place: int) -> PipelineModule:
    """The stages of pipeline rank `place` of a causal LM without values."""
    experts = [m for m in model.modules() if is_stacked_experts(m)]
    for m in experts:
        m.forward = _pass_hidden  # the split runs the model once, and which experts run depends on values
    try:
        return split_causal_lm(model, shape.ranks, schedule=shape.schedule, virtual_stages=shape.virtual_stages, stage_rank=place)
    finally:
        for m in experts:
            del m.forward


def _pass_hidden(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def recompute(model: nn.Module) -> None:
    """Lets a model keep the inputs of its blocks only. Raises `ModelError` where it cannot."""
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # the second in transformers 4
    enable = next((getattr(model, n) for n in names if callable(getattr(model, n, None))), None)
    if enable is None:
        raise ModelError(f"{type(model).__name__} has no {names[0]}(): its blocks cannot be recomputed by a plan")
    enable()


def even_routes(model: nn.Module) -> None:
    """Replaces what depends on the values of tokens: every expert gets the same number of them. For a rehearsal."""
    for module in convert(model).values():  # the engine leaves them alone
        if module.is_plain:
            module._compute = partial(_step_by_step, module)  # type: ignore[method-assign]
    for name, layer in model.named_modules():
        dispatcher = getattr(layer, "_dispatcher", None)
        if isinstance(dispatcher, Dispatcher):
            layer._dispatcher = EvenDispatcher(dispatcher.group, dispatcher.num_experts, name)
        if isinstance(getattr(layer, "statistics", None), Statistics) and "statistics" in layer.__dict__:
            layer.statistics = _NoStatistics(1)
        if isinstance(layer, Router):
            layer.kept = _keeps_all  # type: ignore[method-assign]


def _step_by_step(module: SharedStackedExperts, rows: torch.Tensor, counts: list[int], values: dict[str, torch.Tensor]) -> torch.Tensor:
    """As the model's own code, which keeps the output of every operation."""
    inner = module.between(grouped_linear(rows, values["gate_up_proj"], counts))
    return grouped_linear(inner, values["down_proj"], counts)


def _keeps_all(index: torch.Tensor, weights: torch.Tensor) -> None:
    """Equal loads are within any capacity of a factor of 1 or more."""


class _NoStatistics(Statistics):
    def record(self, *_: Any) -> None:
        return


class EvenDispatcher(Dispatcher):
    """Plans the way of tokens without looking at them, for equal loads."""

    def route(self, index: torch.Tensor, keep: torch.Tensor | None = None) -> Route:
        tokens, k = index.shape
        with unset_fake_temporarily():
            return even_route(self, tokens, k, index.device)


def even_route(dispatcher: EvenDispatcher, tokens: int, k: int, device: torch.device) -> Route:
    """Assignment i of each rank goes to expert i modulo their number."""
    group, number = dispatcher.group, dispatcher.num_experts
    experts = torch.arange(tokens * k) % number
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=number).repeat(group.size, 1)
    placement = place_experts(counts.sum(0).tolist(), _without_copies(group))
    table = slot_counts(counts, placement)
    hops, arrived = dispatcher._hops(table, placement, device)
    begin = placement.first[group.rank]
    here = table[:, begin : begin + len(placement.slots[group.rank])]
    return Route(tokens, k, order.to(device), hops, arrived, here.sum(0).tolist(), placement, counts.sum(0))


def _without_copies(group: ExpertGroup) -> ExpertGroup:
    return replace(group, copies=False)


def _options(source: ModelSource, shape: Shape) -> dict[str, Any]:
    options: dict[str, Any] = {"schedule": shape.schedule}
    if shape.virtual_stages is not None:
        options["virtual_stages"] = shape.virtual_stages
    if shape.recompute:
        options["activation_checkpoint_interval"] = 1
    unknown = [o for o in options if o not in source.options]
    if "activation_checkpoint_interval" in unknown:
        raise ConfigError(f"{source.name} takes no activation_checkpoint_interval: its stages cannot be recomputed by a plan")
    return {name: value for name, value in options.items() if name not in unknown}


def _cast(model: nn.Module, settings: Config, mesh: Mesh) -> None:
    """The types in which the engine uses parameters and buffers."""
    rule = sharding_rule(settings)
    for laid in lay_out(model, rule, groups_of(mesh)):
        for _, p in laid.named:
            p.data = p.data.to(laid.dtype)
    cast_buffers(model, rule)
