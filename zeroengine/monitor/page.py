"""A report as one page of HTML with drawings in SVG. Nothing is fetched and nothing runs: it can be mailed and archived.

Whatever on the page comes from the document carries its path there in `data-json`, and `data-as` says how it is shown, so a
program can check that the page says what the document says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from zeroengine.monitor.svg import Drawing
from zeroengine.monitor.words import in_bytes, in_counts, in_seconds

SHOWN: Mapping[str, Callable[[Any], str]] = {
    "bytes": in_bytes,
    "counts": in_counts,
    "seconds": in_seconds,
    "share": lambda value: f"{100 * value:.1f} %",
    "factor": lambda value: f"{value:.3g} x",
    "number": lambda value: f"{value:.6g}",
    "mean": lambda value: f"{value:.4g}",
    "text": str,
}
"""How `data-as` shows a value."""

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1f2430; background: #fff; max-width: 960px; margin: 32px auto; padding: 0 20px }
h1 { font-size: 22px; margin: 0 0 4px } h2 { font-size: 16px; margin: 36px 0 8px } p { margin: 4px 0; color: #5b6270 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th { text-align: left; font-weight: 600; color: #5b6270; border-bottom: 1px solid #d5d9e0 } th, td { padding: 3px 14px 3px 0 }
td { border-bottom: 1px solid #eef0f4 } td.n, th.n { text-align: right; padding-right: 0; padding-left: 14px; white-space: nowrap }
svg { display: block; width: 100%; height: auto; margin: 6px 0 } svg text { font-size: 11px; fill: #5b6270 }
.key { display: inline-block; margin-right: 16px; color: #5b6270 }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px }
"""
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6")
_OF_PHASE = {
    "compute": "#4c78a8", "exposed communication": "#e45756", "optimizer": "#54a24b", "idle": "#c9ccd3",
    "forward": "#4c78a8", "backward": "#7ba3cc", "step": "#54a24b", "wait": "#e45756", "move": "#f0b57a", "message": "#c9ccd3",
}  # fmt: skip


class Reader:
    """Values of the document by path, as text that carries the path."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def value(self, path: str) -> Any:
        found: Any = self._document
        for part in path.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found

    def show(self, path: str, how: str = "text", tag: str = "span", more: str = "") -> str:
        value = self.value(path)
        if value is None:
            return f"<{tag}{more}>–</{tag}>"
        return f'<{tag}{more} data-json="{escape(path)}" data-as="{how}">{escape(SHOWN[how](value))}</{tag}>'

    def cell(self, path: str, how: str = "text") -> str:
        return self.show(path, how, "td", "" if how == "text" else ' class="n"')


def render_page(document: Mapping[str, Any]) -> str:
    read = Reader(document)
    body = "\n".join([
        _head(read, document), _memory(read, document), _time(read, document), _traffic(read, document), _experts(read, document),
        _loss(read, document),
    ])  # fmt: skip
    data = json.dumps(document, allow_nan=False).replace("</", "<\\/")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Training run</title>\n<style>{_STYLE}</style></head>\n'
        f'<body>\n{body}\n<script type="application/json" id="report">{data}</script>\n</body></html>\n'
    )


def _head(read: Reader, document: Mapping[str, Any]) -> str:
    mesh = ", ".join(f"{escape(name)} {read.show(f'run.mesh.{name}', 'number')}" for name in document["run"]["mesh"]) or "one rank"
    return (
        f"<h1>{read.show('run.model')}</h1>\n<p>{read.show('run.parameters', 'counts')} parameters, ZeRO stage "
        f"{read.show('run.stage', 'number')}, {read.show('run.dtype')} on {read.show('run.world', 'number')} ranks ({mesh}), device "
        f"{read.show('run.device')}. {read.show('run.steps', 'number')} steps of {read.show('run.batch.train', 'number')} samples, "
        f"{read.show('run.batch.micro', 'number')} to a rank and backward.</p>"
    )


def _table(head: list[tuple[str, bool]], rows: list[str]) -> str:
    cells = "".join(f'<th class="n">{name}</th>' if is_number else f"<th>{name}</th>" for name, is_number in head)
    return f"<table><tr>{cells}</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _keys(entries: list[tuple[str, str]]) -> str:
    """(colour, what it stands for) as a legend."""
    return "<p>" + "".join(f'<span class="key"><i style="background:{c}"></i>{name}</span>' for c, name in entries) + "</p>"


def _kinds(read: Reader, where: str, count: int) -> str:
    rows = [
        read.cell(f"{where}.{i}.kind") + read.cell(f"{where}.{i}.predicted", "bytes") + read.cell(f"{where}.{i}.measured", "bytes")
        for i in range(count)
    ]
    return _table([("kind", False), ("predicted", True), ("measured", True)], rows)


def _memory(read: Reader, document: Mapping[str, Any]) -> str:
    parts = ["<h2>Memory by kind</h2><p>Of the fullest rank, between steps.</p>", _kinds(read, "memory", len(document["memory"]))]
    if document["peak"]:
        parts += ["<p>The most of the fullest rank within a step.</p>", _kinds(read, "peak", len(document["peak"]))]
    plot = document["plots"].get("memory")
    if plot is not None:
        parts.append(
            f"<h2>Memory over a step</h2><p>Step {read.show('plots.memory.step', 'number')} of rank "
            f"{read.show('plots.memory.rank', 'number')}: kinds on top of each other.</p>"
        )
        names = [read.show(f"plots.memory.kinds.{i}.kind") for i in range(len(plot["kinds"]))]
        parts.append(_keys([(_COLOURS[i % 8], name) for i, name in enumerate(names)]))
        draw = Drawing("memory", read, 240, plot["x_ticks"], plot["y_ticks"])
        draw.axes("plots.memory.x_ticks", "seconds", "plots.memory.y_ticks", "bytes")
        below = [0.0] * len(plot["x"])
        for i, series in enumerate(plot["kinds"]):
            above = [b + size for b, size in zip(below, series["bytes"], strict=True)]
            draw.band(plot["x"], below, above, _COLOURS[i % 8])
            below = above
        parts.append(draw.text())
        parts.append("<p>All that the process held meanwhile, activations and libraries included.</p>")
        draw = Drawing("resident", read, 150, plot["x_ticks"], plot["resident_ticks"])
        draw.axes("plots.memory.x_ticks", "seconds", "plots.memory.resident_ticks", "bytes")
        draw.line(plot["x"], plot["resident"], "#1f2430")
        parts.append(draw.text())
    return "\n".join(parts)


def _time(read: Reader, document: Mapping[str, Any]) -> str:
    time, plots = document["time"], document["plots"]
    if time["step"] is None:
        return "<h2>Time by phase</h2><p>Times are recorded with monitor.run_dir.</p>"
    rows = [
        read.cell(f"time.phases.{i}.phase") + read.cell(f"time.phases.{i}.predicted", "seconds")
        + read.cell(f"time.phases.{i}.measured", "seconds") + read.cell(f"time.phases.{i}.share", "share")
        for i in range(len(time["phases"]))
    ]  # fmt: skip
    head = [("phase", False), ("predicted", True), ("measured", True), ("share", True)]
    parts = [
        f"<h2>Time by phase</h2><p>A step takes {read.show('time.step', 'seconds')}: the mean over ranks and over all steps but "
        f"the first. Idle is waiting for a pipeline's neighbours, and time outside of the engine.</p>",
        _table(head, rows),
    ]
    if "exposed" in plots:
        parts.append("<h2>Exposed communication</h2><p>What each rank does in a step.</p>")
        parts.append(_exposed(read, plots["exposed"]))
    if "timeline" in plots:
        parts.append(f"<h2>Timeline</h2><p>Step {read.show('plots.timeline.step', 'number')}: phases, and what moved meanwhile.</p>")
        parts.append(_timeline(read, plots["timeline"]))
    return "\n".join(parts)


def _exposed(read: Reader, plot: Mapping[str, Any]) -> str:
    keys = [(_OF_PHASE[name], read.show(f"plots.exposed.phases.{i}")) for i, name in enumerate(plot["phases"])]
    draw = Drawing("exposed", read, 30 + 26 * len(plot["rows"]), plot["x_ticks"], None)
    draw.axes("plots.exposed.x_ticks", "seconds")
    for i, row in enumerate(plot["rows"]):
        top, left = draw.top + 26 * i, 0.0
        draw.label(top + 14, "rank ", f"plots.exposed.rows.{i}.rank")
        for name, seconds in zip(plot["phases"], row["seconds"], strict=True):
            draw.bar(left, left + max(seconds, 0.0), top, 18, _OF_PHASE[name])
            left += max(seconds, 0.0)
    return _keys(keys) + draw.text()


def _timeline(read: Reader, plot: Mapping[str, Any]) -> str:
    names = ("forward", "backward", "step", "wait", "message", "move")
    words = {"step": "optimizer", "wait": "waiting for a collective", "message": "waiting for a neighbour", "move": "data moving"}
    keys = [(_OF_PHASE[name], words.get(name, name)) for name in names]
    draw = Drawing("timeline", read, 30 + 40 * len(plot["rows"]), plot["x_ticks"], None)
    draw.axes("plots.timeline.x_ticks", "seconds")
    for i, row in enumerate(plot["rows"]):
        top = draw.top + 40 * i
        draw.label(top + 14, "rank ", f"plots.timeline.rows.{i}.rank")
        for order in ("phase", "wait", "move"):
            for j, (lane, name, _, start, end) in enumerate(row["spans"]):
                if lane == order:
                    shown = name if lane == "phase" else "message" if lane == "wait" and name in ("send", "recv") else lane
                    at = f"plots.timeline.rows.{i}.spans.{j}.{1 if lane == 'phase' else 2}"
                    draw.bar(
                        start, end, top + (20 if lane == "move" else 0), 12 if lane == "move" else 18, _OF_PHASE.get(shown, "#9d755d"), at
                    )
    return _keys(keys) + draw.text()


def _traffic(read: Reader, document: Mapping[str, Any]) -> str:
    rows = []
    for i in range(len(document["traffic"])):
        at = f"traffic.{i}"
        rows.append(
            read.cell(f"{at}.dims") + read.cell(f"{at}.stream") + read.cell(f"{at}.operation") + read.cell(f"{at}.predicted", "bytes")
            + read.cell(f"{at}.measured", "bytes") + read.cell(f"{at}.calls", "mean") + read.cell(f"{at}.exposed", "seconds")
        )  # fmt: skip
    head = [("dimension", False), ("stream", False), ("operation", False), ("predicted", True), ("measured", True)]
    head += [("operations", True), ("waited", True)]
    return (
        "<h2>Bytes by collective and dimension</h2><p>What a rank sends in a step, the mean over ranks and over all steps but the first. "
        "Waiting is for all operations of a stream together.</p>" + _table(head, rows)
    )


def _experts(read: Reader, document: Mapping[str, Any]) -> str:
    if not document["experts"]:
        return ""
    rows = [
        read.cell(f"experts.{i}.layer") + read.cell(f"experts.{i}.imbalance", "factor") + read.cell(f"experts.{i}.skew", "factor")
        + read.cell(f"experts.{i}.dropped", "number")
        for i in range(len(document["experts"]))
    ]  # fmt: skip
    head = [("layer", False), ("busiest expert over mean", True), ("busiest rank over mean", True), ("dropped", True)]
    plot = document["plots"]["experts"]
    parts = [f"<h2>Load of the experts</h2><p>Tokens in step {read.show('plots.experts.step', 'number')}.</p>", _table(head, rows)]
    for i, layer in enumerate(plot["layers"]):
        parts.append(f"<p>{read.show(f'plots.experts.layers.{i}.layer')}</p>")
        draw = Drawing(f"experts-{i}", read, 120, None, plot["y_ticks"])
        draw.axes(None, "", "plots.experts.y_ticks", "counts")
        draw.columns(layer["load"], "#4c78a8")
        parts.append(draw.text())
    return "\n".join(parts)


def _loss(read: Reader, document: Mapping[str, Any]) -> str:
    plot = document["plots"].get("loss")
    if plot is None:
        return ""
    draw = Drawing("loss", read, 220, plot["x_ticks"], plot["y_ticks"])
    draw.axes("plots.loss.x_ticks", "number", "plots.loss.y_ticks", "number")
    draw.line(plot["steps"], plot["values"], "#4c78a8")
    return "<h2>Loss</h2><p>By step, the mean over ranks and micro-batches.</p>\n" + draw.text()
