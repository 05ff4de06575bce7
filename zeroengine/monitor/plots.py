"""What the page draws, as data: series, spans, and the ticks of the axes. Times are seconds, memory bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zeroengine.monitor.record import RankRecord

MOST_POINTS = 400  # of a line: more cannot be told apart on the page
MOST_RANKS = 32  # rows of the timeline


def make_plots(records: Sequence[RankRecord], phases: Sequence[str]) -> dict[str, Any]:
    """Plots for which there are data."""
    made = {
        "memory": _memory(records),
        "timeline": _timeline(records),
        "exposed": _exposed(records, phases),
        "experts": _experts(records),
        "loss": _loss(records),
    }
    return {name: plot for name, plot in made.items() if plot is not None}


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high` or a little beyond: 1, 2 or 5 times a power of ten apart."""
    span = high - low or abs(high) or 1.0
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def byte_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """The same, a power of two apart."""
    step = 2.0 ** math.ceil(math.log2(max(high - low, high / 64, 1.0) / most))
    first = math.floor(low / step)
    return [i * step for i in range(first, max(math.ceil(high / step), first + 1) + 1)]


def thinned(points: Sequence[Any]) -> list[Any]:
    """At most `MOST_POINTS` of them, the first and the last included."""
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[round(i * (len(points) - 1) / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]


def _memory(records: Sequence[RankRecord]) -> dict[str, Any] | None:
    """Over one step of the rank that held most: kinds on top of each other, and all that the process held."""
    traced = [r for r in records if r.timeline is not None and r.timeline["memory"]]
    if not traced:
        return None
    fullest = max(traced, key=lambda r: max(held for _, held, _ in r.timeline["memory"]) if r.timeline else 0)
    line = fullest.timeline or {}
    samples = thinned(line["memory"])
    start = samples[0][0]
    kinds = list(dict.fromkeys(kind for _, _, found in samples for kind, size in found.items() if size and kind != "disk"))
    stacked: list[dict[str, Any]] = [{"kind": kind, "bytes": [found.get(kind, 0) for _, _, found in samples]} for kind in kinds]
    most = max(sum(series["bytes"][i] for series in stacked) for i in range(len(samples)))
    held, x = [held for _, held, _ in samples], [t - start for t, _, _ in samples]
    return {
        "rank": fullest.rank, "step": line["number"], "x": x, "kinds": stacked, "resident": held,
        "x_ticks": ticks(0.0, x[-1]), "y_ticks": byte_ticks(0, most), "resident_ticks": byte_ticks(min(held), max(held), 4),
    }  # fmt: skip


def _timeline(records: Sequence[RankRecord]) -> dict[str, Any] | None:
    traced = [r for r in records if r.timeline is not None and r.timeline["spans"]][:MOST_RANKS]
    if not traced:
        return None
    lines = [(r, r.timeline or {}) for r in traced]
    start = min(span[3] for _, line in lines for span in line["spans"])
    end = max(span[4] for _, line in lines for span in line["spans"])
    rows = [
        {"rank": r.rank, "spans": [[lane, name, what, a - start, b - start] for lane, name, what, a, b in line["spans"]]}
        for r, line in lines
    ]
    return {"step": lines[0][1]["number"], "rows": rows, "x_ticks": ticks(0.0, end - start)}


def _exposed(records: Sequence[RankRecord], phases: Sequence[str]) -> dict[str, Any] | None:
    """Time by phase of each rank, the mean of a step."""
    found: list[dict[str, Any]] = []
    for r in records[:MOST_RANKS]:
        splits = [s["split"] for s in r.steps if "split" in s]
        splits = splits[1:] or splits
        if splits:
            found.append({"rank": r.rank, "seconds": [sum(s[name] for s in splits) / len(splits) for name in phases]})
    if not found:
        return None
    return {"phases": list(phases), "rows": found, "x_ticks": ticks(0.0, max(sum(max(s, 0.0) for s in row["seconds"]) for row in found))}


def _experts(records: Sequence[RankRecord]) -> dict[str, Any] | None:
    for r in records:
        for step in reversed(r.steps):
            if step.get("experts"):
                loads: dict[str, list[int]] = {name: layer["load"] for name, layer in step["experts"].items()}
                layers = [{"layer": name, "load": load} for name, load in loads.items()]
                return {"step": step["number"], "layers": layers, "y_ticks": ticks(0.0, max(map(max, loads.values())))}
    return None


def _loss(records: Sequence[RankRecord]) -> dict[str, Any] | None:
    points = thinned([(s["number"], s["loss"]) for r in records[:1] for s in r.steps if s.get("loss") is not None])
    if not points:
        return None
    steps, values = [n for n, _ in points], [v for _, v in points]
    return {"steps": steps, "values": values, "x_ticks": ticks(steps[0], steps[-1]), "y_ticks": ticks(min(values), max(values))}
