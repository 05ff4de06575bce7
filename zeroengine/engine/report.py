"""Where the bytes are and what moved: measured from the live tensors, and planned from the layout alone."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from zeroengine.engine.mechanism import Mechanism
from zeroengine.offload.buffers import padded, rounded
from zeroengine.optim.state import moments
from zeroengine.zero.residency import slot_of


def measured_memory(module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """Bytes that this rank holds now, by kind: parameters (values at rest), gradients, optimizer (masters and state),
    working (gathered values, buffers in the pools), buffers (the model's), disk (parameters, masters and state in files, which
    are not in the kinds before), staging (host buffers between files and the rest, and between host and accelerator), and
    host (what `offload_states` moved off an accelerator)."""
    placement = mechanism.placement
    parameters = sum((b.shard.nbytes if b.home.in_memory else 0) if b.policy.shard_params else _nbytes(b.full) for b in mechanism.buckets)
    parameters += sum(p.nbytes for p in module.parameters() if slot_of(p) is None)
    gathered = sum(_nbytes(b.full) for b in mechanism.buckets if b.policy.shard_params)
    pools = sum(pool.bytes() for pool in mechanism.pools)
    for comm in mechanism.groups.all:
        pools += int(getattr(comm, "pool_bytes", int)())
    found = {
        "parameters": parameters,
        "gradients": sum(g.bytes() for g in mechanism.gradients),
        "optimizer": mechanism.optimizer.bytes() if mechanism.optimizer is not None else 0,
        "working": gathered + pools,
        "buffers": sum(b.nbytes for b in module.buffers()),
        "disk": placement.disk_bytes(),
        "staging": placement.staging_bytes(),
    }
    parked = placement.parked
    if parked is not None:
        for lot in parked.lots:
            found[lot.kind] -= lot.nbytes
        where = "disk" if parked.tier == "nvme" else "host"
        found[where] = found.get(where, 0) + parked.total
    return found


def planned_memory(module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """Bytes at rest after a step that the layout predicts, for the kinds that live on."""
    parameters = sum(p.nbytes for p in module.parameters() if slot_of(p) is None)
    placement, disk = mechanism.placement, 0
    values, state = [], []  # bytes of the records on disk
    for bucket in mechanism.buckets:
        held = bucket.layout.shard_numel if bucket.policy.shard_params else bucket.layout.padded
        if bucket.home.in_memory:
            parameters += bucket.dtype.itemsize * held
        else:
            disk += bucket.dtype.itemsize * held
            values.append(rounded(bucket.dtype.itemsize * held))
    gradients = optimizer = 0
    kept = moments(mechanism.optimizer.optimizer) if mechanism.optimizer is not None else 0
    for g in mechanism.gradients:
        bucket, layout, policy = g.bucket, g.bucket.layout, g.bucket.policy
        gradients += g.rule.accumulate.itemsize * (layout.shard_numel if policy.shard_grads else layout.padded)
        lo, hi = (bucket.own.start, bucket.own.stop) if policy.shard_state else (0, layout.padded)
        wide = torch.promote_types(bucket.dtype, torch.float32).itemsize
        # a master of its own
        there = policy.shard_params and placement.values_on_host
        own = bucket.dtype.itemsize < wide or (placement.on_host(bucket.index) and not there)
        master = wide * (hi - lo) if own else 0
        parts = [wide * (s.end - s.start) for s in layout.segments(lo, hi)]
        if placement.state(bucket.index).in_memory:
            optimizer += master + kept * sum(parts)
        else:
            disk += master + kept * sum(parts)
            state.append(rounded(master) + rounded(kept * sum(padded(n) for n in parts)))
    staging = sum(
        min(rule.buffers, len(records)) * max(records, default=0)
        for rule, records in ((placement.values_rule, values), (placement.state_rule, state))
    )
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "disk": disk, "staging": staging}


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


def planned_traffic(mechanism: Mechanism, accumulation: int) -> dict[str, float]:
    """Bytes of parameters and gradients that this rank sends in one step of `accumulation` micro-batches, by
    "group.operation". Each micro-batch reads every bucket's values once in forward and once in backward: Rajbhandari et al.
    (2020), section 7."""
    found: dict[str, float] = defaultdict(float)
    for bucket in mechanism.buckets:
        share = (bucket.comm.size - 1) / bucket.comm.size
        if bucket.policy.shard_params:
            found[f"{bucket.comm.name}.all_gather"] += 2 * accumulation * bucket.layout.padded * bucket.dtype.itemsize * share
    for g in mechanism.gradients:
        (sums, replicas), bucket = g.streams, g.bucket
        layout, policy, width = bucket.layout, bucket.policy, g.rule.accumulate.itemsize
        share = (bucket.comm.size - 1) / bucket.comm.size
        rounds = accumulation if policy.shard_grads else 1
        found[f"{sums.name}.reduce_scatter"] += rounds * layout.padded * g.rule.wire.itemsize * share
        found[f"{replicas.name}.all_reduce"] += rounds * 2 * layout.shard_numel * width * (replicas.size - 1) / replicas.size
        if not policy.shard_state:
            found[f"{sums.name}.all_gather"] += layout.padded * width * share  # the reduced gradients' other slices
        elif not policy.shard_params:
            found[f"{bucket.comm.name}.all_gather"] += layout.padded * bucket.dtype.itemsize * share  # the updated values
    return dict(found)


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
