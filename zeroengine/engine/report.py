"""Where the bytes are and what moved: measured from the live tensors, and planned from the layout alone."""

from __future__ import annotations

import torch
from torch import nn

from zeroengine.config.zero import ZeroSection
from zeroengine.engine.accounting import BucketFacts, at_rest, at_stage, gathered_peak, of_step, travelling
from zeroengine.engine.mechanism import Mechanism
from zeroengine.optim.state import moments as kept_by
from zeroengine.zero.policy import STAGES
from zeroengine.zero.residency import slot_of


def measured_memory(module: nn.Module, mechanism: Mechanism) -> dict[str, int]:
    """Bytes that this rank holds now, by kind: parameters (values at rest), gradients (between steps those of the last one, whose
    memory serves other tensors of the next meanwhile), optimizer (masters and state),
    working (gathered values, buffers in the pools), buffers (the model's), disk (parameters, masters and state in files, which
    are not in the kinds before), staging (host buffers between files and the rest, and between host and accelerator), and
    host (what `offload_states` moved off an accelerator)."""
    placement = mechanism.placement
    parameters = sum((b.shard.nbytes if b.home.in_memory else 0) if b.policy.shard_params else _nbytes(b.full) for b in mechanism.buckets)
    parameters += sum(p.nbytes for p in module.parameters() if slot_of(p) is None)
    gathered = sum(_nbytes(b.full) for b in mechanism.buckets if b.policy.shard_params)
    pools = sum(pool.bytes() for pool in mechanism.pools) + sum(comm.pool_bytes() for comm in mechanism.groups.all)
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


def planned_memory(module: nn.Module, mechanism: Mechanism, accumulation: int, kept: int | None = None) -> dict[str, int]:
    """Bytes that the layout predicts for a step of `accumulation` micro-batches whose gradients are reduced. `kept`: tensors of a
    parameter's size that the optimizer will keep, where there is none yet."""
    moments = _moments(mechanism) if kept is None else kept
    return at_rest(bucket_facts(mechanism, accumulation), moments, _loose(module), *_buffers(mechanism))


def planned_in_step(module: nn.Module, mechanism: Mechanism, accumulation: int, zero: ZeroSection) -> dict[str, int]:
    """The same, and the most of gathered values and gradients on their way within a step, as `working`."""
    facts = bucket_facts(mechanism, accumulation)
    return {**planned_memory(module, mechanism, accumulation), "working": gathered_peak(facts, zero) + travelling(facts)}


def planned_at_stages(module: nn.Module, mechanism: Mechanism, accumulation: int, zero: ZeroSection) -> dict[int, dict[str, int]]:
    """The same at each stage above this one."""
    facts, kept, loose = bucket_facts(mechanism, accumulation), _moments(mechanism), _loose(module)
    return {stage: at_stage(facts, stage, kept, loose, zero, *_buffers(mechanism)) for stage in STAGES if stage > zero.stage}


def _buffers(mechanism: Mechanism) -> tuple[int, int]:
    """Host buffers for values and for state that live on a disk."""
    return mechanism.placement.values_rule.buffers, mechanism.placement.state_rule.buffers


def _loose(module: nn.Module) -> int:
    """Bytes of parameters in no bucket."""
    return sum(p.nbytes for p in module.parameters() if slot_of(p) is None)


def _moments(mechanism: Mechanism) -> int:
    return kept_by(mechanism.optimizer.optimizer) if mechanism.optimizer is not None else 0


def bucket_facts(mechanism: Mechanism, accumulation: int) -> list[BucketFacts]:
    """What memory and traffic of the buckets follow from."""
    rules = {g.bucket.index: g.rule for g in mechanism.gradients}
    placement = mechanism.placement
    return [
        BucketFacts(
            layout=b.layout, dtype=b.dtype, policy=b.policy, rank=b.comm.rank, replicas=mechanism.groups.replicas.size,
            rule=rules.get(b.index), accumulation=accumulation, kind=b.comm.name, values_in_memory=b.home.in_memory,
            state_in_memory=placement.state(b.index).in_memory,
            apart=placement.on_host(b.index) and not (b.policy.shard_params and placement.values_on_host),
        )
        for b in mechanism.buckets
    ]  # fmt: skip


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


def planned_traffic(mechanism: Mechanism, accumulation: int) -> dict[str, int]:
    """Bytes of parameters and gradients that this rank sends in one step of `accumulation` micro-batches, by
    "group.operation". Each micro-batch reads every bucket's values once in forward and once in backward: Rajbhandari et al.
    (2020), section 7."""
    return of_step(bucket_facts(mechanism, accumulation))


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
