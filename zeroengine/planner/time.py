"""How long a step takes: computation from FLOPs and bytes, the pipeline by its own schedule, communication by its links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroengine.engine.accounting import BucketFacts
from zeroengine.mesh import DIMS, Degrees
from zeroengine.pipeline.actions import Schedule
from zeroengine.pipeline.simulate import Costs, Timeline, simulate
from zeroengine.planner.hardware import Hardware
from zeroengine.planner.passes import Pass
from zeroengine.planner.rehearsal import StagePass

DIM_OF: Mapping[str, str] = {
    "params": "dp_shard", "grads": "dp_shard", "replicas": "dp_replicate", "tensor": "tp", "sequence heads": "cp", "sequence ring": "cp",
    "experts": "ep", "expert params": "dp_shard", "expert grads": "dp_shard", "pipeline": "pp", "labels": "pp",
}  # fmt: skip
"""Dimension of the mesh that a communicator runs along. Those of control values (a few bytes) are not listed."""
_UPDATE_PASSES = 7  # a fused update reads gradient, master and two moments and writes three of them: 28 bytes of 4
_IN_LAYERS = ("tensor", "sequence heads", "sequence ring", "experts")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: `pipeline` from the first forward to the last backward, in which `bubble` is the share of idle time and
    `inside` what collectives inside layers take; `exposed` gradients and values that nothing hides; `update`."""

    pipeline: float
    inside: float
    bubble: float
    exposed: float
    update: float

    @property
    def total(self) -> float:
        return self.pipeline + self.exposed + self.update


def by_dim(sent: Mapping[str, float]) -> dict[str, float]:
    """Bytes by dimension of the mesh."""
    found: dict[str, float] = {}
    for name, size in sent.items():
        dim = DIM_OF.get(name.rpartition(".")[0])
        if dim is not None:
            found[dim] = found.get(dim, 0.0) + size
    return found


def reach(degrees: Degrees, dim: str, ep: int = 1) -> int:
    """How many neighbouring ranks a group along `dim` spans, from its first to its last."""
    if dim == "ep":
        return ep * degrees.tp
    inner = math.prod(getattr(degrees, d) for d in DIMS[DIMS.index(dim) + 1 :]) if dim != "dp_shard" else degrees.tp
    size = degrees.dp_shard * degrees.cp if dim == "dp_shard" else getattr(degrees, dim)
    return int(inner * size)


def is_inside(degrees: Degrees, dim: str, hardware: Hardware, ep: int = 1) -> bool:
    """A group along `dim` lies on one node."""
    return reach(degrees, dim, ep) <= hardware.per_node


def sending_time(name: str, size: float, calls: float, degrees: Degrees, hardware: Hardware, ep: int = 1) -> float:
    """Seconds of `calls` operations of a communicator that send `size` bytes in all."""
    dim = DIM_OF.get(name.rpartition(".")[0])
    if dim is None:
        return 0.0
    inside = is_inside(degrees, dim, hardware, ep)
    rate, latency = (hardware.inside, hardware.latency_inside) if inside else (hardware.between, hardware.latency_between)
    return size / rate + calls * latency


def computing_time(counted: Pass, hardware: Hardware, wide: bool) -> tuple[float, float]:
    """(forward, backward) seconds of one micro-batch's computation."""
    rate = hardware.flops32 if wide else hardware.flops
    share = counted.forward_touched / counted.touched if counted.touched else 0.5
    forward = (
        counted.forward_flops / rate + counted.forward_touched / hardware.memory_rate + hardware.operation * counted.operations * share
    )
    every = counted.flops / rate + counted.touched / hardware.memory_rate + hardware.operation * counted.operations
    return forward, every - forward


def stage_times(
    passes: Sequence[StagePass], degrees: Degrees, hardware: Hardware, wide: bool, ep: int
) -> tuple[list[tuple[float, float]], float]:
    """(forward, backward) of each stage with its collectives, and the longest time of those in one micro-batch."""
    found, most = [], 0.0
    for p in passes:
        forward, backward = computing_time(p.counted, hardware, wide)
        inside = sum(
            sending_time(name, size, p.counted.calls.get(name, 0.0), degrees, hardware, ep)
            for name, size in p.counted.sent.items()
            if name.rpartition(".")[0] in _IN_LAYERS
        )
        share = forward / max(forward + backward, 1e-30)
        found.append((forward + inside * share, backward + inside * (1 - share)))
        most = max(most, inside)
    return found, most


def run_schedule(schedule: Schedule, times: Sequence[tuple[float, float]], message: float) -> Timeline:
    """The schedule's own actions played through with these times of the stages. A backward in two parts is halved."""
    forward, backward = (sum(t[i] for t in times) / len(times) for i in (0, 1))
    whole = forward + backward or 1.0
    factors = [(f + b) / whole for f, b in times]
    return simulate(schedule, Costs(forward, backward / 2, backward / 2, message=message, of_stage=factors.__getitem__))


def exposed_time(
    sent: Mapping[str, float], calls: Mapping[str, float], degrees: Degrees, hardware: Hardware, backward: float, ep: int
) -> float:
    """Of the data-parallel collectives: what does not fit beside `overlap` of the backward."""
    needed = sum(sending_time(name, size, calls.get(name, 0.0), degrees, hardware, ep) for name, size in sent.items())
    return max(needed - hardware.overlap * backward, 0.0)


def update_time(facts: Sequence[BucketFacts], moments: int, hardware: Hardware) -> float:
    """Of the optimizer, with what has to come from the host or a disk for it."""
    seconds = 0.0
    for b in facts:
        if b.rule is None:
            continue
        elements = b.layout.shard_numel if b.policy.shard_state else b.layout.padded
        moved = 4.0 * elements * (_UPDATE_PASSES - 4 + 2 * moments)
        seconds += moved / (hardware.host_rate if b.state_on_host or not b.state_in_memory else hardware.memory_rate)
        if b.state_on_host:
            seconds += elements * (4.0 + b.dtype.itemsize) / hardware.link_rate  # gradients there, values back
        if not b.state_in_memory:
            master, parts = b.state(moments)
            seconds += 2.0 * (master + sum(parts)) / hardware.disk_rate
    return seconds
