"""Plans as text: a ranked table, one plan in full, the rule of placement with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeroengine.mesh import DIMS, Degrees
from zeroengine.monitor.words import aligned
from zeroengine.planner.hardware import Hardware
from zeroengine.planner.plan import Plan
from zeroengine.planner.search import Found
from zeroengine.planner.time import by_dim, is_inside, reach
from zeroengine.wording import size

_KINDS = ("parameters", "gradients", "optimizer", "working", "activations", "passing", "reserved")
_SHOWN_REASONS = 6


def seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 1 else f"{time * 1e3:.1f} ms"


def table(plans: Sequence[Plan], limit: int) -> str:
    """The best plans."""
    rows = [["#", "layout", "memory", *_KINDS, "host", "step", "bubble", "sent"]]
    for i, plan in enumerate(plans[:limit], 1):
        kinds = plan.fullest.memory.kinds()
        rows.append([
            str(i), plan.layout.show(), size(plan.fullest.memory.total), *(size(kinds[k]) for k in _KINDS),
            size(kinds["host"] + kinds["disk"]), seconds(plan.time.total), f"{plan.time.bubble:.0%}", size(sum(plan.traffic().values())),
        ])  # fmt: skip
    return aligned(rows)


def in_full(plan: Plan, hardware: Hardware) -> Iterator[str]:
    """Everything about one plan."""
    full, time = plan.fullest, plan.time
    yield f"layout      {plan.layout.show()}; {plan.accumulation} micro-batches a step"
    yield f"memory      {size(full.memory.total)} on rank {full.rank} (pipeline rank {full.place}), the fullest:"
    for kind, nbytes in full.memory.kinds().items():
        if nbytes:
            yield f"            {kind:<12} {size(nbytes):>10}"
    yield f"step        {seconds(time.total)}: computation and layers {seconds(time.pipeline)}"
    yield f"            (collectives inside layers {seconds(time.inside)}, idle {time.bubble:.1%}),"
    yield f"            gradients and values that nothing hides {seconds(time.exposed)}, update {seconds(time.update)}"
    yield "sent        bytes of a step by each rank of the pipeline rank that sends most:"
    busiest = max(plan.ranks, key=lambda r: sum(r.sent.values()))
    for name, nbytes in sorted(busiest.sent.items()):
        yield f"            {name:<32} {nbytes:>20,.0f}"
    yield from placement(plan.traffic(), plan.degrees, hardware, plan.layout.ep)


def placement(traffic: dict[str, float], degrees: Degrees, hardware: Hardware, ep: int = 1) -> Iterator[str]:
    """The rule that what sends most lies innermost, with the numbers of this plan."""
    order = [d for d in (*DIMS, "ep") if traffic.get(d)]
    if not order:
        return
    yield "placement   dimensions from the innermost; what sends most should lie inside a node:"
    for dim in sorted(order, key=lambda d: reach(degrees, d, ep)):
        where = "inside a node" if is_inside(degrees, dim, hardware, ep) else "between nodes"
        yield f"            {dim:<12} {size(traffic[dim]):>10} a step over {reach(degrees, dim, ep)} neighbours, {where}"
    outside = [d for d in order if not is_inside(degrees, d, hardware, ep)]
    inside = [d for d in order if is_inside(degrees, d, hardware, ep)]
    odd = [(o, i) for o in outside for i in inside if traffic[o] > traffic[i]]
    for o, i in odd:
        more = f"{o} sends more between nodes ({size(traffic[o])}) than {i} inside ({size(traffic[i])})"
        yield f"            note: {more}; the mesh's order is fixed"
    if not odd:
        yield "            the rule holds: nothing between nodes sends more than what is inside"


def summary(found: Found) -> Iterator[str]:
    """How many layouts there were, and what was in the way of the others."""
    counts = f"{len(found.fitting)} fit, {len(found.too_large)} are too large, {len(found.refused)} are refused by the engine"
    yield f"{found.tried} layouts: {counts}"
    for plan in found.too_large[:3]:
        yield f"  too large   {plan.layout.show()}: {plan.why_not}"
    for why, count in found.reasons()[:_SHOWN_REASONS]:
        yield f"  refused     {count} x {why}"


def sent_by_dim(plan: Plan) -> dict[str, dict[str, float]]:
    """By rank (as text) and dimension, for JSON."""
    return {str(r.rank): by_dim(r.sent) for r in plan.ranks}
