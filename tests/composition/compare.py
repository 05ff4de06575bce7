"""A combination against one process, and launches of many combinations."""

from __future__ import annotations

import math
from functools import cache
from itertools import zip_longest

import torch

from tests.composition import models, train
from tests.composition.cover import Row
from tests.composition.models import LENGTH, SAMPLES, Trained
from tests.composition.space import label
from tests.ranks import run_ranks

LOSSES = {"fp32": 2e-6, "bf16": 4e-3, "fp16": 1e-3}
NORMS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}
WEIGHTS = {"fp32": 2e-4, "bf16": 0.1, "fp16": 0.02}
"""Largest relative differences. Of weights: of all changes since the start, in the 2-norm, and for one tensor ten times that."""
START, SECONDS = 15.0, 2.0
"""Bounds for one rank of many on few cores: to start, and for one combination; both take a fraction."""

reference = cache(models.reference)


@cache
def start(kind: str) -> dict[str, torch.Tensor]:
    return {n: v.detach().clone() for n, v in models.build(kind).state_dict().items()}


def difference(row: Row, ranks: list[Trained]) -> str:
    """What is not as in one process; empty if all is."""
    dtype = row["dtype"]
    want = reference(row["model"], dtype, row["accumulation"])
    losses = [sum(step) / len(ranks) for step in zip(*(r.losses for r in ranks), strict=True)]
    if not _near(losses, want.losses, LOSSES[dtype]):
        return f"losses {losses}, one process {want.losses}"
    for rank, got in enumerate(ranks):
        if not _near(got.norms, want.norms, NORMS[dtype]):
            return f"rank {rank}: norms {got.norms}, one process {want.norms}"
        if got.norms != ranks[0].norms:
            return f"norms of rank {rank} {got.norms}, of rank 0 {ranks[0].norms}"
        if (got.scale, got.skipped) != (want.scale, want.skipped):
            return f"rank {rank}: loss scale {got.scale} after {got.skipped} skipped steps, one process {want.scale} after {want.skipped}"
        tokens = SAMPLES * LENGTH * row["accumulation"] * 2  # each goes to two experts, none to the last one
        for layer, load in got.loads.items():
            if sum(load) != tokens or load[-1]:
                return f"rank {rank}: load of '{layer}' {load}, of {tokens} assignments"
        for kind, (planned, measured) in got.memory.items():
            if planned != measured:
                return f"rank {rank}: {kind} {measured} bytes, planned {planned}"
    return _weights(ranks[0].weights, want.weights, start(row["model"]), WEIGHTS[dtype])


def _near(got: list[float], want: list[float], bound: float) -> bool:
    return all(a == b or (math.isfinite(a) and abs(a - b) <= bound * abs(b)) for a, b in zip_longest(got, want, fillvalue=math.nan))


def _weights(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], before: dict[str, torch.Tensor], bound: float) -> str:
    if got.keys() != want.keys():
        return f"names of weights: {sorted(got.keys() ^ want.keys())}"
    off = moved = 0.0
    worst = (0.0, "")
    for name, value in want.items():
        if not value.is_floating_point():
            continue
        a = float((got[name].double() - value.double()).norm())
        b = float((value.double() - before[name].to(value.dtype).double()).norm())
        off, moved = off + a**2, moved + b**2
        grain = float(value.double().norm()) * torch.finfo(value.dtype).eps  # what rounding of the weights alone can do
        worst = max(worst, ((a - grain) / max(b, grain), name))
    if off > (bound**2) * moved:
        return f"weights moved by {math.sqrt(moved):.3g} and are off by {math.sqrt(off):.3g}, most of all {worst[1]}"
    return f"{worst[1]} is off by {worst[0]:.3g} of its change" if worst[0] > 10 * bound else ""


def launch(rows: list[Row], folder: str) -> dict[str, list[train.Outcome]]:
    """Runs `rows`, all of one number of ranks, in as few launches as there are failures, plus one. By label, one outcome a rank."""
    found: dict[str, list[train.Outcome]] = {}
    left = list(rows)
    while left:
        ranks = left[0]["ranks"]
        results = run_ranks(train.run, ranks, left, folder, timeout=ranks * (START + SECONDS * len(left)))
        done = max(len(r) for r in results)
        for i, row in enumerate(left[:done]):
            found[label(row)] = [r[i] if i < len(r) else train.Outcome(error="ended before") for r in results]
        left = left[done:]
    return found


def left_behind(rows: list[Row], outcomes: dict[str, list[train.Outcome]]) -> str:
    """What the ranks of a launch hold more of, behind its last combination, than behind its first four; empty if nothing."""
    for rank in range(rows[0]["ranks"]):
        held = [outcomes[label(row)][rank].held for row in rows]
        for what, last in held[-1].items():
            if last > max(h.get(what, 0) for h in held[:4]):
                return f"rank {rank}: {what} {[h.get(what) for h in held]}"
    return ""


def judge(row: Row, outcomes: list[train.Outcome]) -> str:
    """What is wrong with a combination that ran; empty if nothing is."""
    errors = [f"rank {rank}: {o.error}" for rank, o in enumerate(outcomes) if o.trained is None]
    if errors:
        return "\n".join(errors)
    return difference(row, [o.trained for o in outcomes if o.trained is not None])
