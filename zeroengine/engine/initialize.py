"""`zeroengine.initialize`: from a model and a configuration to an engine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from zeroengine.comm import Fabric, init_distributed
from zeroengine.config import Config, resolve_batch
from zeroengine.device import local_device
from zeroengine.engine.data import EngineLoader, build_loader
from zeroengine.engine.engine import ZeroEngine, take_apart
from zeroengine.engine.experts import groups_of, spread_experts
from zeroengine.engine.mechanism import attach_optimizer, build_mechanism, check_same_config
from zeroengine.engine.memory import check_memory
from zeroengine.engine.observers import observe
from zeroengine.engine.parallel import check_plain, share_layers, share_sequences
from zeroengine.engine.pipeline_initialize import cut_model, initialize_pipeline, local_parameters
from zeroengine.errors import ConfigError, DivergenceError, ModelError, OffloadError
from zeroengine.logging import log_once, log_rank0
from zeroengine.mesh import Degrees, Mesh, build_mesh
from zeroengine.moe.layer import declared_degree
from zeroengine.offload.inputs import NO_EFFECT
from zeroengine.optim.build import check_trainable, optimizer_factory, param_groups
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.optim.schedules import build_scheduler
from zeroengine.pipeline.module import PipelineModule
from zeroengine.zero.build import check_free
from zeroengine.zero.held import to_device
from zeroengine.zero.host import keep_freed_memory
from zeroengine.zero.policy import policy_for
from zeroengine.zero.tensor import whole_shape

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config
OptimizerSource = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` (and `--config` under our own name) to a script's parser."""
    group = parser.add_argument_group("zeroengine", "training engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for compatibility; the engine is always used")
    group.add_argument("--deepspeed_config", "--zeroengine_config", dest="deepspeed_config", help="path of the JSON configuration")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerSource | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    mesh: Mesh | None = None,
    config_params: ConfigSource | None = None,
) -> tuple[ZeroEngine, ZeroOptimizer | None, EngineLoader | None, Any]:
    """Shards `model` and returns (engine, optimizer, data loader, scheduler). Collective.

    `config`: path, dict or `Config` with DeepSpeed's keys (docs/config.md); also taken from `config_params` or
    `args.deepspeed_config`. `optimizer`: a torch optimizer over the model's parameters, or a callable that makes one over
    parameter groups; it wins over the config's section. `model_parameters`: parameters or group dicts to train.
    `lr_scheduler`: a scheduler built on `optimizer`, or a callable that takes the optimizer. `training_data`: a dataset
    from which each rank gets its part. `mesh`: one that several engines share; made from the config otherwise. With `mesh.pp`
    over 1 the model is a `PipelineModule`, or a transformers causal LM, which is cut at its list of blocks.

    Without any optimizer the engine is for evaluation. Raises `ConfigError` and `ModelError` on every rank.
    """
    settings = Config.load(_config_source(args, config, config_params))
    if not isinstance(model, nn.Module):
        raise ModelError(f"zeroengine.initialize takes model=nn.Module, not {type(model).__name__}")
    if mpu is not None:
        raise ConfigError("mpu is not used: give parallel degrees in the config's `mesh` section, or a `mesh`")
    init_distributed(distributed_port=distributed_port)
    device = local_device()
    keep_freed_memory(device)
    _check_places(settings, device)
    if settings.activation_checkpointing.cpu_checkpointing and device.type == "cpu":
        log_rank0(NO_EFFECT)
    _check_folders(settings)
    owns_mesh = mesh is None
    stages = mesh.degrees.pp if mesh is not None else settings.mesh.pp
    if stages > 1 and not isinstance(model, PipelineModule):
        model = cut_model(model, stages, optimizer, settings.mesh)
        model_parameters = local_parameters(model, model_parameters)
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    if mesh is not None:
        _check_mesh(settings, mesh)
    mesh = mesh if mesh is not None else _mesh(settings, device, stages, _expert_degree(settings, model))
    try:
        check_same_config(settings, mesh.everyone)
        made: tuple[ZeroEngine, ZeroOptimizer | None, EngineLoader | None, Any]
        if isinstance(model, PipelineModule):
            made = initialize_pipeline(
                model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, settings, mesh, owns_mesh, _scheduler
            )
        else:
            made = _initialize(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, settings, mesh, owns_mesh)
    except (ConfigError, ModelError, OffloadError, DivergenceError):  # on all ranks alike: another engine may be made in this process
        if owns_mesh:
            mesh.close()
        raise
    try:
        observe(made[0])
    except ConfigError:  # on all ranks alike
        made[0].destroy()
        raise
    return made


def _initialize(
    model: nn.Module, optimizer: OptimizerSource | None, model_parameters: Iterable[Any] | None,
    training_data: Dataset[Any] | None, lr_scheduler: Any, collate_fn: Callable[..., Any] | None, settings: Config,
    mesh: Mesh, owns_mesh: bool,
) -> tuple[ZeroEngine, ZeroOptimizer | None, EngineLoader | None, Any]:  # fmt: skip
    batch = resolve_batch(settings, mesh.sample_groups)
    source: Any = optimizer
    if source is None and settings.optimizer is not None:
        source = optimizer_factory(settings.optimizer.type, settings.optimizer.params, model)
    if isinstance(source, torch.optim.Optimizer):
        groups = source.param_groups
    else:
        groups = param_groups(model, model_parameters)
    if source is not None:
        check_trainable(model, groups)
    elif not any(True for _ in model.parameters()):
        raise ModelError("the model has no parameters; zeroengine.initialize needs an nn.Module with parameters")
    check_free(model)
    check_plain(model)
    to_device(model, mesh.fabric.device)
    layers = share_layers(model, settings, mesh)
    sequences = experts = mechanism = zero_optimizer = None
    members = groups_of(mesh)
    try:
        sequences = share_sequences(model, settings, mesh, layers, trains=source is not None)
        experts = spread_experts(model, settings, mesh, members, layers=layers, sequences=sequences)
        mechanism = build_mechanism(model, settings, members, trains=source is not None, everyone=mesh.everyone)
        if source is not None:
            tensor = mesh.tensor_control if layers is not None else None
            zero_optimizer = attach_optimizer(mechanism, source, groups, settings, tensor)
            check_memory(model, mechanism, batch.accumulation)
        scheduler = _scheduler(lr_scheduler, zero_optimizer, settings)
        loader = build_loader(training_data, batch.micro, mesh, collate_fn, settings)
        engine = ZeroEngine(model, settings, batch, mesh, owns_mesh, mechanism, scheduler, loader, sequences, layers, experts)
    except Exception:  # the model is as it was and can be given again
        take_apart(model, mechanism, sequences, layers, experts)
        raise
    _tell(engine)
    return engine, zero_optimizer, loader, scheduler


def _config_source(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource:
    from_args = getattr(args, "deepspeed_config", None)
    given = [c for c in (config, config_params, from_args) if c is not None]
    if not given:
        raise ConfigError("no configuration: pass config=<path or dict> to zeroengine.initialize, or --deepspeed_config")
    return given[0]


def _mesh(settings: Config, device: torch.device, stages: int = 1, ep: int = 1) -> Mesh:
    health = settings.health
    fabric = Fabric(device, timeout=health.comm_timeout, stall_timeout=health.stall_timeout)
    try:
        return build_mesh(fabric, **mesh_degrees(settings, fabric.world_size, stages).sizes(), ep=ep)
    except ConfigError:
        fabric.close()
        raise


def mesh_degrees(settings: Config, world_size: int, stages: int = 1) -> Degrees:
    """The mesh that `settings` ask for on `world_size` ranks, for a model of so many pipeline stages (ranks of the pipeline).
    Raises `ConfigError` for degrees that do not fit one another, the model or the world."""
    degrees, zero = settings.mesh, settings.zero_optimization
    shard = degrees.dp_shard if degrees.dp_shard is not None else zero.mics_shard_size
    replicate = degrees.dp_replicate
    if degrees.pp not in (1, stages):
        raise ConfigError(
            f"mesh.pp is {degrees.pp}, but the model has {stages} pipeline stage(s); give zeroengine.initialize a "
            "zeroengine.pipe.PipelineModule with num_stages of the same number"
        )
    if shard is not None and replicate == 1:
        ranks = shard * stages * degrees.cp * degrees.tp
        if world_size % ranks:
            key = "zero_optimization.mics_shard_size" if degrees.dp_shard is None else "mesh.dp_shard"
            sizes = {key: shard, "mesh.pp": stages, "mesh.cp": degrees.cp, "mesh.tp": degrees.tp}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise ConfigError(f"{product} = {ranks} does not divide the {world_size} ranks of the job; change a degree")
        replicate = world_size // ranks
    return Degrees.resolve(
        world_size, pp=stages, dp_replicate=replicate, dp_shard=-1 if shard is None else shard, cp=degrees.cp, tp=degrees.tp,
    )  # fmt: skip


def _check_mesh(settings: Config, mesh: Mesh) -> None:
    """Refuses a configuration that asks for another mesh than the one that is given."""
    degrees, zero, fabric = settings.mesh, settings.zero_optimization, mesh.fabric
    is_there = {**mesh.degrees.sizes(), "ep": mesh.experts.size if mesh.experts is not None else 1}
    asked: dict[str, tuple[Any, Any]] = {
        f"mesh.{name}": (getattr(degrees, name), is_there[name]) for name in degrees.model_fields_set if name in is_there
    }
    if zero.mics_shard_size is not None and degrees.dp_shard is None:
        asked["zero_optimization.mics_shard_size"] = (zero.mics_shard_size, is_there["dp_shard"])
    for name in settings.health.model_fields_set & {"comm_timeout", "stall_timeout"}:
        here = fabric.timeout if name == "comm_timeout" else fabric.stall_timeout
        asked[f"health.{name}"] = (getattr(settings.health, name), here)
    other = [f"{key} is {wanted}, that of the mesh {found}" for key, (wanted, found) in asked.items() if wanted not in (None, found)]
    if other:
        raise ConfigError(
            f"zeroengine.initialize(mesh=...) has another mesh than the configuration: {'; '.join(other)}; leave these keys out, or "
            "build the mesh with these values"
        )


def _expert_degree(settings: Config, model: nn.Module) -> int:
    """`mesh.ep`, or what the model's own layers ask for where that is not given."""
    declared = declared_degree(model)
    if settings.mesh.ep > 1 and declared > 1 and settings.mesh.ep != declared:
        raise ConfigError(f"mesh.ep is {settings.mesh.ep}, but the model's MoE layers have ep_size {declared}; leave out one of them")
    return max(settings.mesh.ep, declared)


def _check_places(settings: Config, device: torch.device) -> None:
    """Refuses places for offloaded state that mean nothing, and says once where a section has no effect."""
    zero = settings.zero_optimization
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if section.device == "none":
            continue
        if section.device == "nvme" and not section.nvme_path:
            raise ConfigError(
                f"zero_optimization.{name}.device is nvme and {name}.nvme_path is missing; give the folder for its files, on a local disk"
            )
        if name == "offload_param" and not policy_for(zero.stage).shard_params:
            log_once(f"zero_optimization.offload_param has no effect at stage {zero.stage}: values are whole between uses")
        elif section.device == "cpu" and device.type == "cpu":
            log_once(f"zero_optimization.{name}.device is cpu, and so is the device of this run: states are there already")


def _check_folders(settings: Config) -> None:
    """A checkpoint is one folder that all ranks see. On one host the node's own storage is such a place."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if settings.checkpoint.use_node_local_storage and local < world:
        raise ConfigError(
            f"checkpoint.use_node_local_storage is true, and the {world} ranks of this job run on several hosts ({local} here): "
            "a checkpoint is written to one folder that all hosts see; remove the key and save to a shared file system"
        )


def _scheduler(given: Any, optimizer: ZeroOptimizer | None, settings: Config) -> Any:
    if given is not None:
        is_scheduler = isinstance(given, torch.optim.lr_scheduler.LRScheduler) or hasattr(given, "step")
        if not is_scheduler and callable(given):
            return given(optimizer)
        return given
    if settings.scheduler is None or optimizer is None:
        return None
    return build_scheduler(settings.scheduler, optimizer)


def _tell(engine: ZeroEngine) -> None:
    planned = engine.planned_memory()
    total = sum(whole_shape(p).numel() for p in engine.module.parameters())
    trainable = sum(whole_shape(p).numel() for p in engine.module.parameters() if p.requires_grad)
    sizes = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in planned.items())
    log_rank0(
        f"ZeRO stage {engine.zero_optimization_stage()} on {engine.mesh.data_parallel_size} ranks "
        f"({engine.mesh.shard_params.size} to a shard group), {engine.settings.dtype} weights, {total:,} parameters "
        f"({trainable:,} trainable) in {len(engine.mechanism.buckets)} buckets; a rank holds {sizes}; batch "
        f"{engine.batch.train} = {engine.batch.micro} x {engine.batch.accumulation} x {engine.mesh.sample_groups}"
    )
    if engine.settings.dump_state:
        log_rank0("configuration: " + json.dumps(engine.config, indent=2, default=str))
