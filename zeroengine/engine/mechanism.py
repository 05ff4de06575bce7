"""Builds floors 3 and 4 for one model: buckets, sharder, reducer, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.comm.alike import are_alike, first_difference
from zeroengine.comm.protocol import Communicator
from zeroengine.comm.together import in_turn
from zeroengine.config import Config
from zeroengine.device import DTYPES
from zeroengine.errors import DivergenceError
from zeroengine.offload.placement import FileRule, OffloadRule, Placement
from zeroengine.optim.build import OptimizerFactory, ParamGroups
from zeroengine.optim.layers import step_over_layers
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.optim.options import leaf_lines
from zeroengine.optim.parts import attach
from zeroengine.optim.scaler import LossScaler
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.build import Built, Groups, ShardingRule, build_buckets, cast_buffers, check_same, make_pools
from zeroengine.zero.gradients import BucketGradients, GradientRule
from zeroengine.zero.kept import check_names, compute_in_fp32, kept_modules
from zeroengine.zero.packed import FormatKept, check_packed
from zeroengine.zero.policy import policy_for
from zeroengine.zero.pool import BufferPool
from zeroengine.zero.reducer import Reducer, Reductions
from zeroengine.zero.sharder import Sharder, gather_units
from zeroengine.zero.tied import add_in_place
from zeroengine.zero.window import GatherWindow

_BUCKET = 4 * 1024 * 1024  # elements: large enough for the wire, small beside a model
_MAX_SKIPS = 1000


@dataclass
class Mechanism:
    """Everything that shards one model. `optimizer` is None for an evaluation-only engine."""

    buckets: list[Bucket]
    sharder: Sharder
    reducer: Reductions
    pools: tuple[BufferPool, ...]
    gradients: list[BucketGradients]
    groups: Groups
    masters: dict[int, Tensor]  # fp32 values of 16-bit buckets, until the optimizer takes them
    placement: Placement
    optimizer: ZeroOptimizer | None = None
    handles: tuple[Any, ...] = ()  # of hooks that are nobody else's

    @contextlib.contextmanager
    def exposed(self, *, write: bool) -> Iterator[None]:
        """Context in which everything that this rank holds is read (with `write`: replaced) as if it were in memory. Raises
        `OffloadError` on all ranks. Collective where a disk is used."""
        self.placement.check_here()
        if not write and self.optimizer is not None:
            self.optimizer.check_untorn()
        with self.placement.exposed(self.groups.control, write=write):
            yield
        if write and self.optimizer is not None:
            self.optimizer.torn = None

    def remove(self) -> None:
        """Gives the model back its parameters. Collective."""
        in_turn(
            self.reducer.forget, self.reducer.remove, self.sharder.remove, *(handle.remove for handle in self.handles),
            *(pool.clear for pool in self.pools), self.placement.close,
        )  # fmt: skip


def compute_dtype(config: Config) -> torch.dtype | None:
    """Type of the weights in use; None leaves a model as it is (no 16-bit section)."""
    return None if config.dtype == "fp32" else DTYPES[config.dtype]


def autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What `torch_autocast` puts around the forward. A weight that is cast is not kept for its next use at stage 3: the copies of all
    weights would be there at one time."""
    section = config.torch_autocast
    if not section.enabled:
        return contextlib.nullcontext()
    keep = not policy_for(config.zero_optimization.stage).shard_params
    return torch.autocast(device.type, DTYPES[section.dtype], cache_enabled=keep)


def sharding_rule(config: Config) -> ShardingRule:
    zero = config.zero_optimization
    size = min(zero.bucket_size or _BUCKET, max(zero.reduce_bucket_size, 1))
    if policy_for(zero.stage).shard_params:
        # Two buckets are live at least: the one in use and the one that is fetched.
        size = min(size, max(zero.stage3_max_live_parameters // 2, 1), zero.stage3_prefetch_bucket_size or size)
        if zero.offload_param.device == "nvme":
            size = min(size, max(zero.offload_param.buffer_size, 1))
    return ShardingRule(
        zero.stage, compute_dtype(config), size, zero.stage3_param_persistence_threshold,
        leaf_module=zero.leaf_module, persistent_total=zero.stage3_model_persistence_threshold,
        keep=config.data_types.keep_in_fp32_modules or (),
    )  # fmt: skip


def placement_for(config: Config, module: nn.Module, rank: int, *, trains: bool, everyone: Communicator | None = None) -> Placement:
    """Where the configuration lets state and values of `module` live. Without `trains` there is no state. `everyone`: see
    `Placement`."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    aio = config.aio
    state, values = offload_rules(config, trains=trains)
    made = Placement(device, rank, state, values, FileRule(aio.block_size, aio.queue_depth * aio.intra_op_parallelism))
    made.everyone = everyone
    return made


def offload_rules(config: Config, *, trains: bool = True) -> tuple[OffloadRule, OffloadRule]:
    """Of masters and optimizer state, and of sharded values."""
    zero = config.zero_optimization
    state, values = zero.offload_optimizer, zero.offload_param
    shards_values = policy_for(zero.stage).shard_params
    return (
        OffloadRule(
            state.device, state.nvme_path, state.pin_memory, state.buffer_count, state.ratio,
            read_ahead=state.pipeline_read, write_behind=state.pipeline_write, claim=not state.fast_init,
        ) if trains else OffloadRule(),
        OffloadRule(
            values.device, values.nvme_path, values.pin_memory, values.buffer_count, resident=values.max_in_cpu,
        ) if shards_values else OffloadRule(),
    )  # fmt: skip


def gradient_rule(config: Config, dtype: torch.dtype, ranks: int) -> GradientRule:
    """fp32 accumulation and communication for 16-bit parameters unless the config asks for another type."""
    wide = torch.promote_types(dtype, torch.float32)
    chosen = config.data_types.grad_accum_dtype
    accumulate = DTYPES[chosen] if chosen else wide
    wire = DTYPES[config.communication_data_type] if config.communication_data_type else accumulate
    factor = 1.0 / ranks if config.gradient_reduction == "mean" else 1.0
    if not config.prescale_gradients:
        return GradientRule(accumulate, wire, factor)
    # Everything is divided before the sum unless the configuration says how much of it: sums of 16 bits stay in range.
    before = 1.0 / config.gradient_predivide_factor if config.gradient_predivide_factor != 1.0 else factor
    return GradientRule(accumulate, wire, factor / before, before)


def check_same_config(config: Config, control: Communicator) -> None:
    """Raises `DivergenceError` on every rank where their configurations differ, paths aside. Collective."""
    lines = leaf_lines(config.to_dict())
    if not are_alike(lines, control, "configuration"):
        told = first_difference(lines, control, "keys of the configuration")
        raise DivergenceError(f"{told}; give zeroengine.initialize the same configuration everywhere")


def build_mechanism(module: nn.Module, config: Config, groups: Groups, *, trains: bool, everyone: Communicator | None = None) -> Mechanism:
    """Shards `module`; without `trains` there are no gradients. `everyone`: see `Placement`. Collective."""
    check_same(module, groups)
    pools = make_pools(groups)
    rule = sharding_rule(config)
    if rule.dtype is not None:
        check_names(module, rule.keep)
    prepare(module, rule)
    placement = placement_for(config, module, groups.rank, trains=trains, everyone=everyone)
    built = build_buckets(module, rule, groups, pools, placement, trains=trains)
    sharder = build_sharder(module, built, config)
    gradients = build_gradients(built.buckets if trains else [], config, groups, pools)
    reducer = Reducer(gradients, groups.control)
    pooled, handles = tuple(pools.values()), (*keep_formats(module, rule), *(add_in_place(module) if trains else ()))
    return Mechanism(built.buckets, sharder, reducer, pooled, gradients, groups, built.masters, placement, handles=handles)


def prepare(module: nn.Module, rule: ShardingRule) -> None:
    """Before the buckets: refuses weights that cannot be trained through, and casts buffers. Raises `ModelError`."""
    check_packed(module)
    cast_buffers(module, rule)


def keep_formats(module: nn.Module, rule: ShardingRule) -> tuple[Any, ...]:
    """After the buckets: handles of what keeps modules of a 16-bit model in fp32, and packed weights as they are."""
    hooks = () if rule.dtype is None else compute_in_fp32(list(kept_modules(module, rule.keep).values()), rule.dtype)
    return (*hooks, FormatKept(module))


def build_gradients(buckets: list[Bucket], config: Config, groups: Groups, pools: dict[str, BufferPool]) -> list[BucketGradients]:
    """What reduces the gradients of the trainable buckets. The mean is over all ranks that train together, also for experts,
    whose gradients are added up over fewer ranks: each has the tokens of others."""
    made = []
    for b in buckets:
        if b.trainable:
            group, rule = groups.of(b.params[0]), gradient_rule(config, b.dtype, groups.data_parallel_size)
            made.append(BucketGradients(b, rule, group.grads, group.replicas, pools[group.grads.name]))
    return made


def build_sharder(module: nn.Module, built: Built, config: Config) -> Sharder:
    zero = config.zero_optimization
    window = GatherWindow(
        [sum(b.layout.padded for b in unit) for unit in gather_units(built.buckets, built.units)],
        zero.stage3_prefetch_bucket_size,
        zero.stage3_max_reuse_distance,
        zero.stage3_max_live_parameters,
    )
    return Sharder(module, built.buckets, window, built.units)


def attach_optimizer(
    mechanism: Mechanism, source: torch.optim.Optimizer | OptimizerFactory, groups: ParamGroups, config: Config,
    tensor: Communicator | None = None,
) -> ZeroOptimizer:  # fmt: skip
    """Builds the sharded update from the user's own optimizer, or from what makes one over parameter groups. `tensor`: control
    over the ranks that share layers."""
    mesh = mechanism.groups
    attached = attach(source, groups, mechanism.gradients, mechanism.masters)
    mechanism.optimizer = ZeroOptimizer(
        attached, mechanism.reducer, mechanism.sharder, mesh.control, mesh.params.ranks,
        LossScaler.from_config(config.fp16), config.gradient_clipping, _MAX_SKIPS, config.zero_optimization.ignore_unused_parameters,
        mechanism.placement,
    )  # fmt: skip
    if tensor is not None:
        step_over_layers(mechanism.optimizer, mesh.params.ranks, tensor)
    mechanism.placement.agree(mesh.control, "setting memory and disk aside")
    return mechanism.optimizer
