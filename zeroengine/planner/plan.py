"""One layout of a job, worked out: memory of every pipeline rank, bytes of every collective, time of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroengine.config import Config
from zeroengine.engine.accounting import BucketFacts, of_step
from zeroengine.errors import ZeroEngineError
from zeroengine.mesh import Degrees
from zeroengine.optim.state import moments_of
from zeroengine.pipeline.checks import check
from zeroengine.pipeline.module import PipelineModule
from zeroengine.pipeline.schedules import find_rule, whole_backward
from zeroengine.pipeline.simulate import Timeline
from zeroengine.planner.layouts import Job, Layout
from zeroengine.planner.memory import Memory, pipeline_activations, rank_memory
from zeroengine.planner.model import ModelSource
from zeroengine.planner.paper import paper_mesh
from zeroengine.planner.rehearsal import Chain, StagePass, rehearse
from zeroengine.planner.stage import PaperRank, Workshop
from zeroengine.planner.time import StepTime, by_dim, exposed_time, run_schedule, sending_time, stage_times, update_time
from zeroengine.wording import size

_EVERY_RANK = 4  # pipeline ranks up to which all are looked at; of more, the first, some in the middle, and the last


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank's share. `sent`: bytes of a step by "communicator.operation"."""

    place: int
    rank: int
    memory: Memory
    sent: dict[str, float]
    facts: tuple[BucketFacts, ...]


@dataclass(frozen=True)
class Plan:
    """A layout and what it takes. `why_not`: the reason for which it cannot run, None if it can."""

    layout: Layout
    accumulation: int
    degrees: Degrees
    ranks: tuple[RankPlan, ...]
    time: StepTime
    timeline: Timeline | None
    why_not: str | None = None

    @property
    def fullest(self) -> RankPlan:
        return max(self.ranks, key=lambda r: r.memory.total)

    def traffic(self) -> dict[str, float]:
        """Bytes of the rank that sends most, by dimension of the mesh."""
        return by_dim(max(self.ranks, key=lambda r: sum(r.sent.values())).sent)


@dataclass(frozen=True)
class Refused:
    """A layout that the engine does not take, and its reason."""

    layout: Layout
    why_not: str


class Planner:
    """Works out layouts of one model and job. What layouts have in common is built and rehearsed once."""

    def __init__(self, source: ModelSource, job: Job) -> None:
        self.source, self.job = source, job
        self._workshop = Workshop(source)
        self._built: dict[Any, list[PaperRank] | ZeroEngineError] = {}
        self._rehearsed: dict[int, Chain] = {}

    def plan(self, layout: Layout) -> Plan | Refused:
        """Never raises for a layout that cannot be."""
        try:
            return self._plan(layout)
        except (ZeroEngineError, NotImplementedError) as error:
            return Refused(layout, str(error))

    def _plan(self, layout: Layout) -> Plan:
        job = self.job
        settings = layout.settings(job)
        accumulation = layout.accumulation(job)
        mesh, _ = paper_mesh(settings, job.ranks, 0, layout.pp)
        schedule = None
        if layout.pp > 1:
            steps = find_rule(layout.schedule).build(layout.pp, accumulation, layout.virtual_stages)
            schedule = check(whole_backward(steps) if layout.recompute else steps).schedule
        ranks = self._ranks(layout, settings)
        described = [self._facts(rank, layout, settings, accumulation) for rank in ranks]
        chain = self._chain(layout, ranks)
        passes = chain.passes
        times, inside = stage_times(passes, mesh.degrees, job.hardware, job.dtype == "fp32", layout.ep)
        timeline = None
        if schedule is not None:
            message = max(p.forward_bytes for p in passes)
            timeline = run_schedule(schedule, times, sending_time("pipeline.send", message, 1.0, mesh.degrees, job.hardware))
        found = tuple(
            self._rank_plan(rank, facts, loose, settings, accumulation, chain, timeline)
            for rank, (facts, loose) in zip(ranks, described, strict=True)
        )
        moments = moments_of(settings.optimizer)
        running = timeline.duration if timeline is not None else accumulation * sum(times[0])
        exposed = max(exposed_time(*_data_traffic(r), mesh.degrees, job.hardware, _backward(times, r, timeline), layout.ep) for r in found)
        update = max(update_time(r.facts, moments, job.hardware) for r in found)
        time = StepTime(running, accumulation * inside, timeline.bubble if timeline is not None else 0.0, exposed, update)
        made = Plan(layout, accumulation, mesh.degrees, found, time, timeline)
        return replace(made, why_not=self._lacks(made))

    # --- parts ----------------------------------------------------------------------------------------------------

    def _ranks(self, layout: Layout, settings: Config) -> list[PaperRank]:
        key = layout.cut
        if key not in self._built:
            self._built.clear()  # only neighbours in the order of the search share them
            self._rehearsed.clear()
            try:
                self._built[key] = self._workshop.ranks(settings, self.job.ranks, layout.shape(), _places(layout.pp))
            except ZeroEngineError as error:
                self._built[key] = error
        found = self._built[key]
        if isinstance(found, ZeroEngineError):
            raise found
        return found

    def _chain(self, layout: Layout, ranks: list[PaperRank]) -> Chain:
        """Of `ranks`, those of this layout."""
        if layout.micro not in self._rehearsed:
            self._rehearsed[layout.micro] = rehearse(ranks, self.source, layout.micro, self.job.sequence)
        return self._rehearsed[layout.micro]

    def _facts(self, rank: PaperRank, layout: Layout, settings: Config, accumulation: int) -> tuple[list[BucketFacts], int]:
        mesh, _ = paper_mesh(settings, self.job.ranks, rank.rank, layout.pp)
        return rank.facts(torch.device(self.job.hardware.device), accumulation, settings, mesh)

    def _rank_plan(
        self, rank: PaperRank, facts: list[BucketFacts], loose: int, settings: Config, accumulation: int,
        chain: Chain, timeline: Timeline | None,
    ) -> RankPlan:  # fmt: skip
        moments, hardware = moments_of(settings.optimizer), self.job.hardware
        place, passes = rank.mesh.coordinate("pp"), chain.passes
        if timeline is None:
            counted = passes[0].counted
            activations, passing = counted.saved, counted.peak - counted.saved
        else:
            activations, passing = pipeline_activations(timeline, chain, place)
        buffers = float(sum(b.nbytes for b in rank.module.buffers()))
        memory = rank_memory(facts, loose, moments, settings, activations, passing, buffers, hardware.reserved)
        sent: dict[str, float] = dict(of_step(facts))
        for p in _own(passes, timeline, place):
            for name, nbytes in p.counted.sent.items():
                sent[name] = sent.get(name, 0.0) + accumulation * nbytes
        if timeline is not None:
            _add_messages(sent, timeline, passes, place, chain.labels)
            _add_ties(sent, rank, facts)
        sent = {n: s for n, s in sent.items() if s and by_dim({n: s})}
        return RankPlan(place, rank.rank, memory, sent, tuple(facts))

    def _lacks(self, plan: Plan) -> str | None:
        """What does not fit, with the kind that takes most and the missing bytes."""
        full, job = plan.fullest, self.job
        if full.memory.total > job.memory:
            kind = full.memory.largest()
            return (
                f"rank {full.rank} (pipeline rank {full.place}) needs {size(full.memory.total)}, "
                f"{size(full.memory.total - job.memory)} more than the {size(job.memory)} there are; "
                f"most of it is {kind}, {size(full.memory.kinds()[kind])}"
            )
        if full.memory.host > job.host_memory:
            return f"rank {full.rank} needs {size(full.memory.host)} of host memory, and has {size(job.host_memory)}"
        return None


def _data_traffic(rank: RankPlan) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes and calls of the collectives of buckets."""
    sent: dict[str, float] = dict(of_step(rank.facts))
    times = max((b.accumulation for b in rank.facts if b.policy.shard_grads), default=1)
    return sent, {name: float(len(rank.facts) * times) for name in sent}


def _places(pp: int) -> list[int]:
    return list(range(pp)) if pp <= _EVERY_RANK else sorted({0, 1, pp // 2, pp - 1})


def _own(passes: list[StagePass], timeline: Timeline | None, place: int) -> Iterable[StagePass]:
    return passes if timeline is None else [p for p in passes if timeline.schedule.placement[p.stage] == place]


def _backward(times: list[tuple[float, float]], rank: RankPlan, timeline: Timeline | None) -> float:
    """Seconds of one micro-batch's backward in the rank's stages, beside which gradients can travel."""
    return sum(b for s, (_, b) in enumerate(times) if timeline is None or timeline.schedule.placement[s] == rank.place)


def _add_messages(sent: dict[str, float], timeline: Timeline, passes: list[StagePass], place: int, labels: float) -> None:
    placement, micros = timeline.schedule.placement, timeline.schedule.micro_batches
    size = 0.0
    for p in passes:
        if placement[p.stage] != place:
            continue
        if p.stage + 1 < len(placement) and placement[p.stage + 1] != place:
            size += p.forward_bytes
        if p.stage and placement[p.stage - 1] != place:
            size += p.backward_bytes
    sent["pipeline.send"] = sent.get("pipeline.send", 0.0) + micros * size
    if placement[0] == place and placement[-1] != place:
        sent["labels.send"] = micros * labels


def _add_ties(sent: dict[str, float], rank: PaperRank, facts: list[BucketFacts]) -> None:
    """The owner of a tied weight adds up the others' gradients and sends the sum to each."""
    module = rank.module
    if not isinstance(module, PipelineModule):
        return
    place = rank.mesh.coordinate("pp")
    for tie in module.ties:
        ranks = module.ranks_of(tie)
        if place not in ranks or len(ranks) < 2:
            continue
        mine = [b for b in facts if b.rule is not None and any(s.name in tie.names for s in b.layout.specs)]
        nbytes = sum(
            (b.layout.shard_numel if b.policy.shard_state else b.layout.padded) * b.rule.accumulate.itemsize for b in mine if b.rule
        )
        sent["pipeline.send"] = sent.get("pipeline.send", 0.0) + nbytes * (len(ranks) - 1 if place == ranks[0] else 1)
