"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zeroengine.monitor.words import aligned, in_bytes, in_counts, in_seconds


def render_text(document: Mapping[str, Any]) -> str:
    run = document["run"]
    mesh = " x ".join(f"{name} {size}" for name, size in run["mesh"].items()) or "one rank"
    parts = [
        f"{run['model']}: {in_counts(run['parameters'])} parameters, ZeRO stage {run['stage']}, {run['dtype']}, {run['world']} ranks "
        f"({mesh}), {run['steps']} steps of {run['batch']['train']} samples",
        "Memory of the fullest rank between steps\n" + _memory(document["memory"]),
        *(["The most of the fullest rank within a step\n" + _memory(document["peak"])] if document["peak"] else []),
        "Bytes that a rank sends in a step\n" + _traffic(document["traffic"]),
    ]
    time = document["time"]
    if time["step"] is None:
        parts.append("Times are recorded with monitor.run_dir")
    else:
        parts.append(f"Time of a step: {in_seconds(time['step'])}\n" + _time(time["phases"]))
    if document["experts"]:
        parts.append("Experts\n" + _experts(document["experts"]))
    return "\n\n".join(parts) + "\n"


def _memory(rows: list[dict[str, Any]]) -> str:
    table = [["kind", "predicted", "measured"]]
    return aligned([*table, *([r["kind"], _or(in_bytes, r["predicted"]), _or(in_bytes, r["measured"])] for r in rows)])


def _traffic(rows: list[dict[str, Any]]) -> str:
    table = [["dims", "stream", "operation", "predicted", "measured", "operations", "waited"]]
    for r in rows:
        table.append([
            r["dims"], r["stream"], r["operation"], _or(in_bytes, r["predicted"]), in_bytes(r["measured"]), f"{r['calls']:.4g}",
            _or(in_seconds, r["exposed"]),
        ])  # fmt: skip
    return aligned(table)


def _time(rows: list[dict[str, Any]]) -> str:
    table = [["phase", "predicted", "measured", "share"]]
    for r in rows:
        table.append([r["phase"], _or(in_seconds, r["predicted"]), in_seconds(r["measured"]), f"{100 * r['share']:.1f} %"])
    return aligned(table)


def _experts(rows: list[dict[str, Any]]) -> str:
    table = [["layer", "busiest expert", "busiest rank", "dropped"]]
    return aligned([*table, *([r["layer"], f"{r['imbalance']:.3g} x", f"{r['skew']:.3g} x", str(r["dropped"])] for r in rows)])


def _or(show: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else show(value)
