"""Bytes that one rank holds at its fullest moment, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from zeroengine.config import Config
from zeroengine.engine.accounting import BucketFacts, at_rest, gathered_peak, travelling
from zeroengine.pipeline.simulate import Timeline
from zeroengine.planner.rehearsal import Chain, StagePass

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
    working = gathered_peak(facts, zero) + travelling(facts)
    at_hand = rest["parameters"] - values + rest["gradients"] + rest["optimizer"] - state + working + activations + passing
    return Memory(
        parameters=rest["parameters"] - values, gradients=rest["gradients"], optimizer=rest["optimizer"] - state,
        working=working + (0 if on_host else staging), activations=activations, passing=passing, buffers=buffers,
        reserved=reserved + FRAGMENTS * at_hand, host=values + state + (staging if on_host else 0), disk=rest["disk"],
    )  # fmt: skip


def pipeline_activations(timeline: Timeline, chain: Chain, rank: int) -> tuple[float, float]:
    """(bytes of all micro-batches in flight at their most, what one pass needs beside) of a pipeline rank. A stage keeps what it was sent
    until its backward; messages of the next computation are received meanwhile, and the last one to each neighbour may not have left. The
    first stage has the inputs of all micro-batches, the last one their labels."""
    passes, placement = chain.passes, timeline.schedule.placement
    here = [p for p in passes if placement[p.stage] == rank]
    arriving, leaving = _messages(passes, placement, rank)

    def kept(stage: int) -> float:
        apart = stage > 0 and placement[stage - 1] != rank
        return passes[stage].counted.saved + (passes[stage - 1].forward_bytes if apart else 0.0)

    held = timeline.peak_memory(rank, kept) + max(arriving, default=0.0) + sum(leaving.values())
    if placement[0] == rank:
        held += timeline.schedule.micro_batches * chain.inputs
    if placement[-1] == rank and placement[0] != rank:
        held += timeline.schedule.micro_batches * chain.labels
    return held, max((p.counted.peak - p.counted.saved for p in here), default=0.0)


def _messages(passes: Sequence[StagePass], placement: Sequence[int], rank: int) -> tuple[list[float], dict[int, float]]:
    """Bytes of each message that comes to a pipeline rank, and of the largest to each neighbour."""
    arriving: list[float] = []
    leaving: dict[int, float] = {}
    for before, after in zip(passes, passes[1:], strict=False):
        sender, receiver = placement[before.stage], placement[after.stage]
        if sender == receiver:
            continue
        for size, source, target in ((before.forward_bytes, sender, receiver), (after.backward_bytes, receiver, sender)):
            if target == rank:
                arriving.append(size)
            elif source == rank:
                leaving[target] = max(leaving.get(target, 0.0), size)
    return arriving, leaving
