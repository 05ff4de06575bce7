"""`zeroengine.initialize` for a pipeline: from the stages of a rank to its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from zeroengine.comm.together import together
from zeroengine.config import Config, resolve_batch
from zeroengine.config.sections import MeshSection
from zeroengine.engine.data import EngineLoader, build_loader
from zeroengine.engine.engine import take_apart
from zeroengine.engine.experts import groups_of, spread_experts
from zeroengine.engine.mechanism import Mechanism, attach_optimizer, sharding_rule
from zeroengine.engine.memory import check_memory
from zeroengine.engine.pipeline import PipelineEngine
from zeroengine.engine.pipeline_sharing import share_stage_layers, share_stage_sequences
from zeroengine.engine.pipeline_stages import AcrossStages, StageComms, Ties, build_stages, check_places
from zeroengine.errors import ModelError
from zeroengine.logging import log_rank0
from zeroengine.mesh import Mesh
from zeroengine.optim.build import check_trainable, optimizer_factory, param_groups
from zeroengine.optim.layers import check_elementwise
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.parallel.hf import is_transformers_model
from zeroengine.pipeline.causal_lm import PipelinedCausalLM, split_causal_lm
from zeroengine.pipeline.checks import check
from zeroengine.pipeline.module import PipelineModule
from zeroengine.zero.build import check_free
from zeroengine.zero.held import to_device
from zeroengine.zero.kept import check_names

SchedulerBuilder = Callable[[Any, ZeroOptimizer | None, Config], Any]


def cut_model(model: nn.Module, stages: int, optimizer: Any, section: MeshSection) -> PipelinedCausalLM:
    """A transformers causal LM that was given whole, cut into `stages` at its list of blocks; a torch `optimizer` over it keeps
    what is left here. Raises `ModelError` for a model that is none, or cannot be cut."""
    if not is_transformers_model(model):
        raise ModelError(
            f"mesh.pp is {stages}: {type(model).__name__} is neither a zeroengine.pipe.PipelineModule of {stages} stages nor a "
            "transformers causal LM, which could be cut at its list of blocks; write it as a PipelineModule, or set mesh.pp to 1"
        )
    module = split_causal_lm(model, stages, schedule=section.pp_schedule, virtual_stages=section.pp_virtual_stages)
    if isinstance(optimizer, torch.optim.Optimizer):
        here = {id(p) for p in module.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in here]
    return module


def local_parameters(module: PipelineModule, given: Iterable[Any] | None) -> list[Any] | None:
    """Of `model_parameters` of a whole model those that this rank has, as groups."""
    if given is None:
        return None
    here = {id(p) for p in module.parameters()}
    return [{**group, "params": [p for p in group["params"] if id(p) in here]} for group in param_groups(module, given)]


def initialize_pipeline(
    module: PipelineModule, optimizer: Any, model_parameters: Iterable[Any] | None, training_data: Dataset[Any] | None,
    lr_scheduler: Any, collate_fn: Callable[..., Any] | None, settings: Config, mesh: Mesh, owns_mesh: bool,
    scheduler_builder: SchedulerBuilder,
) -> tuple[PipelineEngine, ZeroOptimizer | None, EngineLoader | None, Any]:  # fmt: skip
    """`initialize` for a pipeline. Collective over the whole job."""
    check_places(module, mesh)
    batch = resolve_batch(settings, mesh.sample_groups)
    check(module.schedule_rule.build(module.num_stages, batch.accumulation, module.virtual_stages))  # before anything is changed
    rule = sharding_rule(settings)
    if rule.dtype is not None:
        check_names(module, rule.keep, mesh.everyone)
    source = optimizer
    if source is None and settings.optimizer is not None:
        source = optimizer_factory(settings.optimizer.type, settings.optimizer.params, module)
    own = isinstance(source, torch.optim.Optimizer)
    groups = source.param_groups if own else param_groups(module, model_parameters)
    comms = StageComms.of(mesh)
    if source is not None:
        trainable = any(p.requires_grad for p in module.parameters())
        if not bool(comms.control.exchange(torch.tensor([trainable]).to(torch.int64), "trainable stages").any()):
            check_trainable(module, groups)
    check_free(module)
    to_device(module, mesh.fabric.device)
    ties = Ties(module, comms, mesh.fabric.device)
    ties.equalize(module)
    members = groups_of(mesh)
    layers = share_stage_layers(module, settings, mesh, mesh.everyone)
    sequences = experts = mechanism = zero_optimizer = None
    trains = source is not None
    try:
        sequences = together(
            mesh.everyone, "sharing the sequences of the stages", lambda: share_stage_sequences(module, settings, mesh, trains)
        )
        experts = spread_experts(module, settings, mesh, members, stage=True, layers=layers, sequences=sequences)
        mechanism = build_stages(module, settings, members, ties, mesh.everyone, trains=trains)
        if source is not None:
            zero_optimizer = _attach(module, mechanism, source, groups, settings, mesh, ties, comms, batch.accumulation)
        scheduler = scheduler_builder(lr_scheduler, zero_optimizer, settings)
        loader = build_loader(training_data, batch.micro, mesh, collate_fn, settings)
    except Exception:
        take_apart(module, mechanism, sequences, layers, experts)
        raise
    engine = PipelineEngine(
        module, settings, batch, mesh, owns_mesh, mechanism, scheduler, loader, comms, ties, experts, layers, sequences
    )  # fmt: skip
    checked = engine.schedule(batch.accumulation)
    sizes = {"cp": mesh.degrees.cp, "tp": mesh.degrees.tp}
    shared_by = "".join(f", x {name} {size}" for name, size in sizes.items() if size > 1)
    log_rank0(
        f"pipeline '{module.schedule_rule.name}': {module.num_stages} ranks, {len(module.placement)} stages, "
        f"{batch.accumulation} micro-batches, x {mesh.sample_groups} data-parallel ranks{shared_by} at "
        f"ZeRO stage {settings.zero_optimization.stage}; "
        f"activations held at most, by rank: {', '.join(map(str, checked.peak_live))}"
    )
    return engine, zero_optimizer, loader, scheduler


def _attach(
    module: PipelineModule, mechanism: Mechanism, source: Any, groups: Any, settings: Config, mesh: Mesh, ties: Ties, comms: StageComms,
    accumulation: int,
) -> ZeroOptimizer:  # fmt: skip
    """The sharded update, with a norm and a reason to skip that all stages share."""
    optimizer = attach_optimizer(mechanism, source, groups, settings)
    shares = mesh.degrees.tp > 1
    together(mesh.everyone, "the optimizer of the stages", lambda: check_elementwise(optimizer) if shares else None)
    check_memory(module, mechanism, accumulation)
    optimizer.norm_rule = AcrossStages(ties, mechanism.groups, comms.control, mesh.tensor_control if shares else None)
    return optimizer
