"""Builds floors 3 and 4 for one model: buckets, sharder, reducer, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroengine.config import Config
from zeroengine.optim.build import OptimizerFactory, ParamGroups
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.optim.parts import attach
from zeroengine.optim.scaler import LossScaler
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.build import Groups, ShardingRule, build_buckets, cast_buffers, check_same
from zeroengine.zero.gradients import BucketGradients, GradientRule
from zeroengine.zero.policy import policy_for
from zeroengine.zero.pool import BufferPool
from zeroengine.zero.reducer import Reducer
from zeroengine.zero.sharder import Sharder
from zeroengine.zero.window import GatherWindow

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BUCKET = 4 * 1024 * 1024  # elements: large enough for the wire, small beside a model
_MAX_SKIPS = 1000


@dataclass
class Mechanism:
    """Everything that shards one model. `optimizer` is None for an evaluation-only engine."""

    buckets: list[Bucket]
    sharder: Sharder
    reducer: Reducer
    pool: BufferPool
    gradients: list[BucketGradients]
    groups: Groups
    masters: dict[int, Tensor]  # fp32 values of 16-bit buckets, until the optimizer takes them
    optimizer: ZeroOptimizer | None = None

    def remove(self) -> None:
        """Gives the model back its parameters. Collective."""
        self.reducer.forget()
        self.reducer.remove()
        self.sharder.remove()
        self.pool.clear()


def compute_dtype(config: Config) -> torch.dtype | None:
    """Type of the weights in use; None leaves a model as it is (no 16-bit section)."""
    return None if config.dtype == "fp32" else _DTYPES[config.dtype]


def sharding_rule(config: Config) -> ShardingRule:
    zero = config.zero_optimization
    size = min(zero.bucket_size or _BUCKET, zero.reduce_bucket_size)
    if policy_for(zero.stage).shard_params:
        # Two buckets are live at least: the one in use and the one that is fetched.
        size = min(size, max(zero.stage3_max_live_parameters // 2, 1), zero.stage3_prefetch_bucket_size or size)
    return ShardingRule(zero.stage, compute_dtype(config), size, zero.stage3_param_persistence_threshold)


def gradient_rule(config: Config, bucket: Bucket, ranks: int) -> GradientRule:
    """fp32 accumulation and communication for 16-bit parameters unless the config asks for another type."""
    wide = torch.promote_types(bucket.dtype, torch.float32)
    chosen = config.data_types.grad_accum_dtype
    accumulate = _DTYPES[chosen] if chosen else wide
    wire = _DTYPES[config.communication_data_type] if config.communication_data_type else accumulate
    return GradientRule(accumulate, wire, 1.0 / ranks if config.gradient_reduction == "mean" else 1.0)


def build_mechanism(module: nn.Module, config: Config, groups: Groups, *, trains: bool) -> Mechanism:
    """Shards `module`; without `trains` there are no gradients. Collective."""
    check_same(module, groups)
    pool = BufferPool()
    rule = sharding_rule(config)
    cast_buffers(module, rule.dtype)
    built = build_buckets(module, rule, groups, pool)
    zero = config.zero_optimization
    window = GatherWindow(
        [b.layout.padded for b in built.buckets],
        zero.stage3_prefetch_bucket_size,
        zero.stage3_max_reuse_distance,
        zero.stage3_max_live_parameters,
    )
    sharder = Sharder(module, built.buckets, window)
    gradients = [
        BucketGradients(b, gradient_rule(config, b, groups.data_parallel_size), groups.grads, groups.replicas, pool)
        for b in built.buckets
        if b.trainable and trains
    ]
    reducer = Reducer(gradients, groups.control)
    return Mechanism(built.buckets, sharder, reducer, pool, gradients, groups, built.masters if trains else {})


def build_scaler(config: Config) -> LossScaler:
    fp16 = config.fp16
    return LossScaler.from_config(fp16) if fp16.enabled else LossScaler.unit()


def attach_optimizer(
    mechanism: Mechanism, source: torch.optim.Optimizer | OptimizerFactory, groups: ParamGroups, config: Config
) -> ZeroOptimizer:
    """Builds the sharded update from the user's own optimizer, or from what makes one over parameter groups."""
    mesh = mechanism.groups
    attached = attach(source, groups, mechanism.gradients, mechanism.masters, mesh.params)
    mechanism.optimizer = ZeroOptimizer(
        attached, mechanism.reducer, mechanism.sharder, mesh.control, mesh.params.ranks,
        build_scaler(config), config.gradient_clipping, _MAX_SKIPS,
    )  # fmt: skip
    return mechanism.optimizer
