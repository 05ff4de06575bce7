"""Where the bytes are and what moved: measured from the live tensors, and planned from the layout alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroengine.engine.mechanism import Mechanism
from zeroengine.zero.residency import slot_of

# fp32 tensors of the parameter's size that torch's optimizers keep; options of the group decide where a range is given.
_MOMENTS = {
    "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "FusedAdagrad": 1, "FusedLion": 1,
    "Adadelta": 2, "ASGD": 1, "Rprop": 2,
}  # fmt: skip


def measured_memory(module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """Bytes that this rank holds now, by kind: parameters (values at rest), gradients, optimizer (masters and state),
    working (gathered values, buffers in the pools), buffers (the model's)."""
    parameters = sum(b.shard.nbytes if b.policy.shard_params else _nbytes(b.full) for b in mechanism.buckets)
    parameters += sum(p.nbytes for p in module.parameters() if slot_of(p) is None)
    gathered = sum(_nbytes(b.full) for b in mechanism.buckets if b.policy.shard_params)
    pools = sum(pool.bytes() for pool in mechanism.pools)
    for comm in mechanism.groups.all:
        pools += int(getattr(comm, "pool_bytes", int)())
    return {
        "parameters": parameters,
        "gradients": sum(g.bytes() for g in mechanism.gradients),
        "optimizer": mechanism.optimizer.bytes() if mechanism.optimizer is not None else 0,
        "working": gathered + pools,
        "buffers": sum(b.nbytes for b in module.buffers()),
    }


def planned_memory(module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """Bytes at rest after a step that the layout predicts, for the kinds that live on."""
    parameters = sum(p.nbytes for p in module.parameters() if slot_of(p) is None)
    for bucket in mechanism.buckets:
        held = bucket.layout.shard_numel if bucket.policy.shard_params else bucket.layout.padded
        parameters += bucket.dtype.itemsize * held
    gradients = optimizer = 0
    moments = _moments(mechanism)
    for g in mechanism.gradients:
        bucket, layout, policy = g.bucket, g.bucket.layout, g.bucket.policy
        gradients += g.rule.accumulate.itemsize * (layout.shard_numel if policy.shard_grads else layout.padded)
        lo, hi = (bucket.own.start, bucket.own.stop) if policy.shard_state else (0, layout.padded)
        wide = torch.promote_types(bucket.dtype, torch.float32).itemsize
        if bucket.dtype.itemsize < wide:  # a master of its own
            optimizer += wide * (hi - lo)
        optimizer += wide * moments * sum(s.end - s.start for s in layout.segments(lo, hi))
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}


def traffic(mechanism: Mechanism) -> dict[str, int]:
    """Bytes that this rank has sent since the last reset, by "group.operation", and their total."""
    found: dict[str, int] = {}
    for comm in mechanism.groups.all:
        for kind, sent in comm.traffic.bytes.items():
            found[f"{comm.name}.{kind}"] = found.get(f"{comm.name}.{kind}", 0) + sent
    moved = [v for k, v in found.items() if not k.startswith(mechanism.groups.control.name + ".")]
    return {**found, "total": sum(moved)}


def reset_traffic(mechanism: Mechanism) -> None:
    for comm in mechanism.groups.all:
        comm.traffic.reset()


def planned_traffic(mechanism: Mechanism, accumulation: int) -> int:
    """Bytes of parameters and gradients that this rank sends in one step of `accumulation` micro-batches, each of which
    reads every bucket's values once in forward and once in backward: Rajbhandari et al. (2020), section 7."""
    total = 0.0
    shards, replicas = mechanism.groups.params.size, mechanism.groups.replicas.size
    share = (shards - 1) / shards
    for bucket in mechanism.buckets:
        if bucket.policy.shard_params:
            total += 2 * accumulation * bucket.layout.padded * bucket.dtype.itemsize * share
    for g in mechanism.gradients:
        layout, policy, sums = g.bucket.layout, g.bucket.policy, g.rule.accumulate.itemsize
        rounds = accumulation if policy.shard_grads else 1
        total += rounds * layout.padded * g.rule.wire.itemsize * share
        total += rounds * 2 * layout.shard_numel * sums * (replicas - 1) / replicas
        if not policy.shard_state:
            total += layout.padded * sums * share  # the reduced gradients' other slices
        elif not policy.shard_params:
            total += layout.padded * g.bucket.dtype.itemsize * share  # the updated values
    return round(total)


def _moments(mechanism: Mechanism) -> int:
    optimizer = mechanism.optimizer
    if optimizer is None:
        return 0
    name = type(optimizer.optimizer).__name__
    defaults: Mapping[str, Any] = optimizer.defaults
    if name in ("SGD", "FusedSGD"):
        return 1 if defaults.get("momentum") else 0
    if name == "RMSprop":
        return 1 + int(bool(defaults.get("momentum"))) + int(bool(defaults.get("centered")))
    return _MOMENTS.get(name, 2) + int(bool(defaults.get("amsgrad")))


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
