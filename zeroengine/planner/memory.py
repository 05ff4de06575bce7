"""Bytes that one rank holds at its fullest moment, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from zeroengine.config import Config
from zeroengine.engine.accounting import BucketFacts, at_rest
from zeroengine.pipeline.simulate import Timeline
from zeroengine.planner.rehearsal import StagePass
from zeroengine.zero.reducer import IN_FLIGHT
from zeroengine.zero.window import GatherWindow

FRAGMENTS = 0.03  # of what the allocator hands out: blocks that do not fit one another


@dataclass(frozen=True)
class Memory:
    """On the device: `parameters`, `gradients`, `optimizer` at rest, `working` (gathered values and gradients that travel),
    `activations` (of all micro-batches in flight), `passing` (what one forward or backward needs beside them), `buffers`, `reserved`
    (context, libraries, fragments). Elsewhere: `host`, `disk`."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    working: float = 0.0
    activations: float = 0.0
    passing: float = 0.0
    buffers: float = 0.0
    reserved: float = 0.0
    host: float = field(default=0.0, metadata={"elsewhere": True})
    disk: float = field(default=0.0, metadata={"elsewhere": True})

    @property
    def total(self) -> float:
        """On the device."""
        return sum(getattr(self, f.name) for f in fields(self) if not f.metadata.get("elsewhere"))

    def kinds(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def largest(self) -> str:
        """The kind on the device that takes most."""
        here = {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata.get("elsewhere")}
        return max(here, key=lambda name: here[name])


def rank_memory(
    facts: Sequence[BucketFacts], loose: int, moments: int, settings: Config, activations: float, passing: float, buffers: float,
    reserved: float,
) -> Memory:  # fmt: skip
    """`loose`: bytes of parameters in no bucket; `moments`: see `at_rest`."""
    zero = settings.zero_optimization
    rest = at_rest(facts, moments, loose, zero.offload_param.buffer_count, zero.offload_optimizer.buffer_count)
    values = sum(b.values for b in facts if b.values_on_host and b.values_in_memory)
    state = sum(m + sum(parts) for b in facts if b.state_on_host and b.state_in_memory and b.rule for m, parts in (b.state(moments),))
    on_host = any(b.values_on_host or b.state_on_host for b in facts)
    staging = rest["staging"]
    working = gathered_peak(facts, settings) + travelling(facts)
    at_hand = rest["parameters"] - values + rest["gradients"] + rest["optimizer"] - state + working + activations + passing
    return Memory(
        parameters=rest["parameters"] - values, gradients=rest["gradients"], optimizer=rest["optimizer"] - state,
        working=working + (0 if on_host else staging), activations=activations, passing=passing, buffers=buffers,
        reserved=reserved + FRAGMENTS * at_hand, host=values + state + (staging if on_host else 0), disk=rest["disk"],
    )  # fmt: skip


def gathered_peak(facts: Sequence[BucketFacts], settings: Config) -> float:
    """Most bytes of gathered values: the engine's own window over the buckets in order, there and back."""
    sharded = [b for b in facts if b.policy.shard_params]
    if not sharded:
        return 0.0
    zero = settings.zero_optimization
    sizes = [b.layout.padded for b in sharded]
    window = GatherWindow(sizes, zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance, zero.stage3_max_live_parameters)
    gathered: set[int] = set()
    most = 0
    for turn in range(2):  # the second pass knows the order
        for phase, order in (("train", range(len(sizes))), ("backward", reversed(range(len(sizes))))):
            window.restart(phase)
            for index in order:
                keep, fetch = window.visit(phase, index, gathered.__contains__)
                gathered = (gathered & keep) | {index, *fetch}
                if turn:
                    most = max(most, sum(sharded[i].layout.padded * sharded[i].dtype.itemsize for i in gathered))
            gathered = set()
    return float(most)


def travelling(facts: Sequence[BucketFacts]) -> float:
    """Whole gradients of buckets that are being added up and reduced at one time, where they are not kept whole anyway."""
    sizes = sorted((b.layout.padded * b.rule.accumulate.itemsize for b in facts if b.rule and b.policy.shard_grads), reverse=True)
    return float(sum(sizes[: IN_FLIGHT + 2]))  # those in flight, the one that was launched, the one that is filled


def pipeline_activations(timeline: Timeline, passes: Sequence[StagePass], rank: int) -> tuple[float, float]:
    """(bytes of all micro-batches in flight at their most, what one pass needs beside) of a pipeline rank."""
    mine = [p.counted for p in passes if timeline.schedule.placement[p.stage] == rank]
    held = timeline.peak_memory(rank, lambda stage: passes[stage].counted.saved)
    return held, max((p.peak - p.saved for p in mine), default=0.0)
