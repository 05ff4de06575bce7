"""The report of a run as one JSON document, from which its text and its page are made. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroengine.monitor.page import render_page
from zeroengine.monitor.plots import make_plots
from zeroengine.monitor.record import RankRecord, moved_in
from zeroengine.monitor.text import render_text

PHASES = ("compute", "exposed communication", "optimizer", "idle")
"""They add up to the time of a step. Idle is waiting for the neighbours in a pipeline, and time outside of the engine."""
_IN_STEP = ("activations", "working")
"""Kinds of memory that come and go in a step."""
_WARM = 1  # steps that are left out of times and bytes: the first makes buffers, state and orders, and tells layouts


@dataclass(frozen=True)
class Report:
    """`document` has everything; bytes, seconds, numbers of elements."""

    document: Mapping[str, Any]

    def json(self, indent: int | None = 1) -> str:
        return json.dumps(self.document, indent=indent, allow_nan=False)

    def text(self) -> str:
        return render_text(self.document)

    def html(self) -> str:
        """One page that needs nothing else: no script, no network. Every number carries the path of its value in `json()`."""
        return render_page(self.document)


def assemble(run: Mapping[str, Any], records: Sequence[RankRecord]) -> Report:
    """The report on all ranks. Memory is the largest of the ranks; bytes, operations and times are the mean over ranks, of a
    step."""
    document: dict[str, Any] = {
        "run": {
            **{k: run[k] for k in ("model", "world", "mesh", "stage", "dtype", "device", "batch")},
            "parameters": _parameters(records), "steps": max((len(r.steps) for r in records), default=0),
        },
        "memory": _memory(records, run.get("plan", {}).get("memory", {})),
        "peak": _peak(records, run.get("plan", {}).get("memory", {})),
        "traffic": _traffic(records),
        "time": _time(records, run.get("plan", {}).get("time", {})),
        "experts": _experts(records),
    }  # fmt: skip
    document["plots"] = make_plots(records, PHASES)
    return Report(document)


def _parameters(records: Sequence[RankRecord]) -> int:
    """Of all stages of a pipeline; the ranks of one stage count the same whole ones."""
    stages = {r.start["place"].get("pp", 0): r.start["parameters"] for r in records}
    return sum(stages.values())


def _memory(records: Sequence[RankRecord], plan: Mapping[str, float]) -> list[dict[str, Any]]:
    """`plan`: predictions for kinds that the layouts say nothing of."""
    plan = {kind: size for kind, size in plan.items() if kind not in _IN_STEP}
    kinds = dict.fromkeys(kind for r in records for kind in (*r.start["predicted"]["memory"], *r.rest.get("memory", ()), *plan))
    rows = []
    for kind in kinds:
        predicted = [r.start["predicted"]["memory"][kind] for r in records if kind in r.start["predicted"]["memory"]]
        measured = [r.rest["memory"][kind] for r in records if kind in r.rest.get("memory", ())]
        rows.append({
            "kind": kind, "predicted": max(predicted, default=plan.get(kind)), "measured": max(measured, default=None), "by_rank": measured,
        })  # fmt: skip
    held = [r.rest["resident"] for r in records if "resident" in r.rest]
    rows.append({"kind": "resident", "predicted": None, "measured": max(held, default=None), "by_rank": held})
    return [row for row in rows if row["predicted"] or row["measured"]]


def _peak(records: Sequence[RankRecord], plan: Mapping[str, float]) -> list[dict[str, Any]]:
    """The most that a rank held within one step."""
    measured = {
        "activations": [r.kept["activations"] for r in records if r.kept is not None],
        "working": [max(kinds.get("working", 0) for _, _, kinds in r.timeline["memory"]) for r in records if r.timeline],
    }
    rows = [
        {"kind": kind, "predicted": plan.get(kind), "measured": max(measured[kind], default=None), "by_rank": measured[kind]}
        for kind in _IN_STEP
    ]
    return [row for row in rows if row["predicted"] or row["measured"]]


def _traffic(records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    predicted: dict[tuple[str, str], list[int]] = {}
    for r in records:
        for stream, operation, sent in r.start["predicted"]["traffic"]:
            predicted.setdefault((stream, operation), []).append(sent)
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for r in records:
        steps = r.steps[_WARM:] or r.steps
        for key, moved in moved_in(steps).items():
            measured.setdefault(key, []).append((moved.sent / len(steps), moved.calls / len(steps)))
    waits = _mean_by_name([_over_steps(r, "streams") for r in records])
    dims = {stream: along for r in records for stream, along in r.start["streams"].items()}
    kinds = {stream: sum(other == stream for other, _ in measured) for stream, _ in measured}
    moving = {key for key, sums in measured.items() if any(sent for sent, _ in sums)}
    rows = []
    for key in sorted({*predicted, *moving}, key=lambda k: -_mean([sent for sent, _ in measured.get(k, [])])):
        stream, operation = key
        sums = measured.get(key, [])
        rows.append({
            "dims": dims.get(stream, "-"), "stream": stream, "operation": operation,
            "predicted": _mean(predicted[key]) if key in predicted else None, "measured": _mean([sent for sent, _ in sums]),
            "calls": _mean([calls for _, calls in sums]),
            "exposed": waits.get(stream) if kinds.get(stream) == 1 else None,
        })  # fmt: skip
    return rows


def _time(records: Sequence[RankRecord], plan: Mapping[str, float]) -> dict[str, Any]:
    splits = [_over_steps(r, "split") for r in records]
    mean = _mean_by_name([s for s in splits if s])
    wall = sum(mean.values())
    phases = [
        {"phase": name, "predicted": plan.get(name), "measured": mean[name], "share": mean[name] / wall if wall else 0.0}
        for name in PHASES
        if name in mean
    ]
    by_rank = [{"rank": r.rank, "seconds": [s[name] for name in PHASES]} for r, s in zip(records, splits, strict=True) if s]
    return {"step": wall if mean else None, "phases": phases, "by_rank": by_rank}


def _experts(records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Loads of the last step that has them. All ranks have those of all layers."""
    for r in records:
        for step in reversed(r.steps):
            if step.get("experts"):
                return [{"layer": name, "step": step["number"], **layer} for name, layer in step["experts"].items()]
    return []


def _over_steps(record: RankRecord, what: str) -> dict[str, float]:
    """Mean of the seconds by name over the steps after the first."""
    steps = [s[what] for s in record.steps if what in s]
    return _mean_by_name(steps[_WARM:] or steps)


def _mean_by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _mean([row.get(name, 0.0) for row in rows]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
