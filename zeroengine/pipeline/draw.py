"""A timeline as text, as a picture, and as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroengine.errors import ConfigError
from zeroengine.pipeline.actions import Kind
from zeroengine.pipeline.simulate import Timeline

_COLOURS = {Kind.FORWARD: "#4c8dd6", Kind.BACKWARD: "#4caf7d", Kind.INPUT: "#7fc8a0", Kind.WEIGHT: "#d9a441"}


def as_text(timeline: Timeline, width: int = 150) -> str:
    """One line a rank: "F3" is forward of micro-batch 3, B backward, I input gradient, W weight gradient, "." idle. With
    several stages a rank the stage stands behind "@". A step too long for `width` columns is drawn without labels."""
    spans, schedule = timeline.spans, timeline.schedule
    if not spans:
        return ""
    labels = {s: str(s.action) if len(schedule.placement) > schedule.size else str(s.action).partition("@")[0] for s in spans}
    origin = min(s.start for s in spans)
    unit = min((s.end - s.start for s in spans if s.end > s.start), default=1.0)
    cell = max(map(len, labels.values())) + 1
    columns = round(timeline.duration / unit)
    if columns * cell > width:
        cell, unit = 1, max(unit, timeline.duration / width)
    lines = []
    for rank in range(schedule.size):
        row = [".".ljust(cell)] * round(timeline.duration / unit)
        for span in (s for s in spans if s.rank == rank):
            first, last = round((span.start - origin) / unit), round((span.end - origin) / unit)
            for i in range(first, min(last, len(row))):
                text = labels[span] if cell > 1 and i == first else span.action.kind.value
                row[i] = text.ljust(cell) if cell == 1 or i == first else "-" * (cell - 1) + " "
        lines.append(f"rank {rank:<2} {''.join(row).rstrip()}")
    return "\n".join(lines)


def as_trace(timelines: Sequence[tuple[str, Timeline]], second: float = 1e6) -> dict[str, Any]:
    """Chrome's trace format: a process for each named timeline, a thread for each rank. `second`: microseconds of a unit."""
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for rank in range(timeline.schedule.size):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}})
        for s in timeline.spans:
            args = {"stage": s.action.stage, "micro_batch": s.action.micro}
            start, length = s.start * second, (s.end - s.start) * second
            what = {"name": str(s.action), "cat": s.action.kind.name, "args": args}
            events.append({"ph": "X", "pid": pid, "tid": s.rank, "ts": start, "dur": length, **what})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, timelines: Sequence[tuple[str, Timeline]], second: float = 1e6) -> None:
    Path(path).write_text(json.dumps(as_trace(timelines, second)), encoding="utf-8")


def write_picture(path: str | Path, timelines: Sequence[tuple[str, Timeline]]) -> None:
    """A PNG, SVG or PDF, by the ending of `path`, with one panel for each named timeline. Needs matplotlib."""
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: its ending says what to draw, and it is none of .png, .svg or .pdf")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a picture ({path}) needs matplotlib: pip install matplotlib, or write a trace (.json)") from error
    figure = Figure(figsize=(14, 1.0 + sum(0.8 + 0.35 * t.schedule.size for _, t in timelines)))
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, squeeze=False)
    for panel, (name, timeline) in zip(panels[:, 0], timelines, strict=True):
        short = len(timeline.spans) <= 64 * timeline.schedule.size
        for s in timeline.spans:
            panel.barh(s.rank, s.end - s.start, left=s.start, color=_COLOURS[s.action.kind], edgecolor="white", linewidth=0.5)
            if short:
                panel.text((s.start + s.end) / 2, s.rank, s.action.micro, ha="center", va="center", fontsize=7, color="white")
        panel.set_title(f"{name}: {timeline.schedule.name}, bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
        panel.set_yticks(range(timeline.schedule.size), [f"rank {r}" for r in range(timeline.schedule.size)])
        panel.invert_yaxis()
        panel.set_xlim(left=0)
    figure.tight_layout()
    figure.savefig(path)
