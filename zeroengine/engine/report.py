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
    "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "Adadelta": 2, "ASGD": 1, "Rprop": 2,
}  # fmt: skip


def measured_memory(module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """Bytes that this rank holds now, by kind: parameters (values at rest), gradients, optimizer (masters and state),
    working (gathered values, buffers in the pools), buffers (the model's)."""
    parameters = sum(b.shard.nbytes if b.policy.shard_params else _nbytes(b.full) for b in mechanism.buckets)
    parameters += sum(p.nbytes for p in module.parameters() if slot_of(p) is None)
    gathered = sum(_nbytes(b.full) for b in mechanism.buckets if b.policy.shard_params)
    pools = mechanism.pool.bytes()
    for comm in (mechanism.groups.params, mechanism.groups.grads, mechanism.groups.replicas, mechanism.groups.control):
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
    gradients = optimizer = 0
    has_optimizer = mechanism.optimizer is not None
    moments = _moments(mechanism)
    for bucket in mechanism.buckets:
        layout, policy, item = bucket.layout, bucket.policy, bucket.dtype.itemsize
        parameters += item * (layout.shard_numel if policy.shard_params else layout.padded)
        if not (bucket.trainable and has_optimizer):
            continue
        wide = torch.promote_types(bucket.dtype, torch.float32).itemsize
        gradients += wide * (layout.shard_numel if policy.shard_grads else layout.padded)
        mine = layout.shard_numel if policy.shard_state else layout.padded
        if item < wide:
            optimizer += wide * mine
        lo, hi = (bucket.own.start, bucket.own.stop) if policy.shard_state else (0, layout.padded)
        for s in layout.segments(lo, hi):
            optimizer += wide * moments * (s.end - s.start)
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}


def traffic(mechanism: Mechanism) -> dict[str, int]:
    """Bytes that this rank has sent since the last reset, by "group.operation", and their total."""
    found: dict[str, int] = {}
    groups = mechanism.groups
    for comm in (groups.params, groups.grads, groups.replicas, groups.control):
        for kind, sent in comm.traffic.bytes.items():
            found[f"{comm.name}.{kind}"] = found.get(f"{comm.name}.{kind}", 0) + sent
    moved = [v for k, v in found.items() if not k.startswith(groups.control.name + ".")]
    return {**found, "total": sum(moved)}


def reset_traffic(mechanism: Mechanism) -> None:
    groups = mechanism.groups
    for comm in (groups.params, groups.grads, groups.replicas, groups.control):
        comm.traffic.reset()


def planned_traffic(mechanism: Mechanism, accumulation: int) -> int:
    """Bytes of parameters and gradients that this rank sends in one step of `accumulation` micro-batches, each of which
    reads every bucket's values once in forward and once in backward: Rajbhandari et al. (2020), section 7."""
    total = 0.0
    groups = mechanism.groups
    share = (groups.params.size - 1) / groups.params.size
    for bucket in mechanism.buckets:
        layout, policy = bucket.layout, bucket.policy
        values = layout.padded * bucket.dtype.itemsize * share
        if policy.shard_params:
            total += 2 * accumulation * values
        if not bucket.trainable:
            continue
        wire = torch.promote_types(bucket.dtype, torch.float32).itemsize
        reduction = layout.padded * wire * share
        total += reduction * (accumulation if policy.shard_grads else 1)
        if not policy.shard_state:
            total += reduction  # the reduced gradients' other slices
        elif not policy.shard_params:
            total += values  # the updated values
        replicas = groups.replicas.size
        rounds = accumulation if policy.shard_grads else 1
        total += rounds * 2 * layout.shard_numel * wire * (replicas - 1) / replicas
    return round(total)


def _moments(mechanism: Mechanism) -> int:
    optimizer = mechanism.optimizer
    if optimizer is None:
        return 0
    name = type(optimizer.optimizer).__name__
    defaults: Mapping[str, Any] = optimizer.defaults
    if name == "SGD":
        return 1 if defaults.get("momentum") else 0
    if name == "RMSprop":
        return 1 + int(bool(defaults.get("momentum"))) + int(bool(defaults.get("centered")))
    return _MOMENTS.get(name, 2) + int(bool(defaults.get("amsgrad")))


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
