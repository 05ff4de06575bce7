"""The start of a job of any size on one machine: mesh, shared layers, stages and buckets, on the meta device."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeroengine.comm import Fabric
from zeroengine.config import Config
from zeroengine.engine.experts import groups_of, spread_experts
from zeroengine.engine.initialize import mesh_degrees
from zeroengine.engine.mechanism import Mechanism, build_mechanism
from zeroengine.engine.parallel import share_layers, share_sequences
from zeroengine.engine.pipeline_sharing import share_stage_layers, share_stage_sequences
from zeroengine.engine.pipeline_stages import StageComms, Ties, build_stages
from zeroengine.engine.report import planned_memory
from zeroengine.errors import ConfigError
from zeroengine.mesh import Mesh, build_mesh
from zeroengine.optim.state import moments_of
from zeroengine.pipeline.module import PipelineModule
from zeroengine.planner.layouts import Job, Layout
from zeroengine.planner.model import ModelSource
from zeroengine.planner.plan import Plan, Planner, Refused
from zeroengine.planner.show import in_full, seconds
from zeroengine.planner.stage import quiet, split_model
from zeroengine.wording import size


@dataclass(frozen=True)
class Built:
    """What one rank of the job builds, in bytes at rest by kind; `buckets`: how many, `elements` in them."""

    place: int
    rank: int
    buckets: int
    elements: int
    memory: dict[str, int]
    took: float


@contextmanager
def simulated(rank: int, world: int) -> Iterator[None]:
    """Rank `rank` of `world` in torch's fake process group, which moves nothing. Raises `ConfigError` inside a real job."""
    if dist.is_initialized():
        raise ConfigError("a dry run makes a process group of its own; call it in a process without one")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_rank(source: ModelSource, job: Job, layout: Layout, place: int) -> Built:
    """Builds the first rank of pipeline rank `place` by the engine's own steps, up to the optimizer."""
    start = time.monotonic()
    settings = layout.settings(job)
    rank = place * (job.ranks // layout.pp)
    with quiet(), simulated(rank, job.ranks):
        fabric = Fabric("cpu")
        mesh = build_mesh(fabric, **mesh_degrees(settings, job.ranks, layout.pp).sizes(), ep=settings.mesh.ep)
        mechanism = _mechanism(source, settings, mesh, layout, place)
        memory = planned_memory(mechanism.sharder.module, mechanism, layout.accumulation(job), moments_of(settings.optimizer))
        elements = sum(b.layout.numel for b in mechanism.buckets)
        fabric.close()
    return Built(place, rank, len(mechanism.buckets), elements, memory, time.monotonic() - start)


def _mechanism(source: ModelSource, settings: Config, mesh: Mesh, layout: Layout, place: int) -> Mechanism:
    if layout.pp > 1 and source.takes_stages:
        model = source.on_meta(num_stages=layout.pp, stage_rank=place)
    else:
        model = source.on_meta()
    groups = groups_of(mesh)
    if layout.pp == 1:
        layers = share_layers(model, settings, mesh)
        sequences = share_sequences(model, settings, mesh, layers)
        spread_experts(model, settings, mesh, groups, False, layers, sequences)
        return build_mechanism(model, settings, groups, trains=True, everyone=mesh.everyone)
    if not isinstance(model, PipelineModule):
        with source.fake:  # the split runs the model once, and on fake tensors it looks at no values
            model = split_model(model, layout.shape(), place)
    ties = Ties(model, StageComms.of(mesh), torch.device("meta"))
    stage_layers = share_stage_layers(model, settings, mesh, mesh.everyone)
    stage_sequences = share_stage_sequences(model, settings, mesh, trains=True)
    spread_experts(model, settings, mesh, groups, True, stage_layers, stage_sequences)
    return build_stages(model, settings, groups, ties, mesh.everyone, trains=True)


def dry_run(source: ModelSource, job: Job, layout: Layout, write: Callable[[str], object]) -> int:
    """Builds every pipeline rank and tells what it holds; then what the plan adds to it for a step. The exit code: 1 where something does
    not fit."""
    if (layout.offload, layout.offload_values) != ("none", "none"):
        raise ConfigError(f"a dry run has no host or disk to offload to ({layout.show()}); leave --offload at none")
    write(f"dry run: {layout.show()} on {job.ranks} ranks, one process, meta device\n")
    begin, worst = time.monotonic(), 0.0
    for place in range(layout.pp):
        built = build_rank(source, job, layout, place)
        kinds = ", ".join(f"{kind} {size(n)}" for kind, n in built.memory.items() if n)
        held = sum(built.memory[k] for k in ("parameters", "gradients", "optimizer"))
        worst = max(worst, held)
        fits = "fits" if held <= job.memory else f"does NOT fit: {size(held - job.memory)} too much"
        write(
            f"  pipeline rank {place} (rank {built.rank}): {built.elements:,} parameters in {built.buckets} buckets; {kinds}; "
            f"{size(held)} of {size(job.memory)} before activations: {fits}; {seconds(built.took)}\n"
        )
    plan = Planner(source, job).plan(layout)
    write("".join(f"{line}\n" for line in [*_in_step(plan), *(in_full(plan, job.hardware) if isinstance(plan, Plan) else ())]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write(f"took {seconds(time.monotonic() - begin)} and {size(peak)} of memory on {os.uname().nodename}, torch {torch.__version__}\n")
    return 0 if worst <= job.memory and isinstance(plan, Plan) and plan.why_not is None else 1


def _in_step(plan: Plan | Refused) -> Iterator[str]:
    """What the ranks hold in a step."""
    if isinstance(plan, Refused):
        yield f"in a step: the engine refuses it: {plan.why_not}"
        return
    yield f"in a step of {plan.accumulation} micro-batches, with {size(plan.fullest.memory.reserved)} for context and fragments:"
    for rank in plan.ranks:
        kinds = rank.memory.kinds()
        told = ", ".join(f"{kind} {size(kinds[kind])}" for kind in ("activations", "passing", "working", "buffers") if kinds[kind])
        yield f"  pipeline rank {rank.place}: {told}; {size(rank.memory.total)} in all"
    yield "does NOT fit: " + plan.why_not if plan.why_not is not None else "fits"
