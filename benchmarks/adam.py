"""`python -m benchmarks.adam`: how fast an AdamW step moves memory, ours beside torch's and DeepSpeed's, and a plain copy.

Every implementation is a process; they take turns, round by round, and each round is compared with itself. Which pages of memory a
process gets decides a tenth of its speed and stays as it is while it lives: so all are launched several times.
An AdamW step in fp32 reads four numbers a parameter and writes three (28 bytes); a copy reads one and writes one (8 bytes).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.errors import Unavailable, WorkerFailed
from benchmarks.harness import (
    WorkerGroup,
    idle_warning,
    machine,
    number,
    paired_ratio,
    rotated,
    say,
    table,
    write,
    write_json,
)
from zeroengine.arguments import positive

REFERENCE = "torch fused"
SYSTEMS = ("zeroengine", "zeroengine twin", REFERENCE, "torch foreach", "deepspeed", "copy")
JOB = "benchmarks.adam_worker:job"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.adam", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=positive, default=16_000_000, help="parameters in all (default: 16 million)")
    parser.add_argument("--tensors", type=positive, default=16, help="tensors they are divided into (default: 16)")
    parser.add_argument("--threads", type=positive, default=1, help="threads of each implementation (default: 1)")
    parser.add_argument("--launches", type=positive, default=7, help="times that each is started (default: 7)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each in a launch (default: 3)")
    parser.add_argument("--steps", type=positive, default=3, help="steps a turn (default: 3)")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds for one turn (default: 300)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them here (needs matplotlib)")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes per second of every system, round by round; who is missing and why."""
    skipped: dict[str, str] = {}
    rates: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    for launch in range(options.launches):
        say(f"launch {launch + 1} of {options.launches}")
        with ExitStack() as stack:
            groups: dict[str, WorkerGroup] = {}
            for name in SYSTEMS:
                if name in skipped:
                    continue
                try:
                    groups[name] = stack.enter_context(_start(name, options))
                except (Unavailable, WorkerFailed, OSError) as error:  # OSError: no such interpreter
                    skipped[name] = str(error)
                    continue
                facts[name] = groups[name].facts[0]
                groups[name].ask({"steps": options.steps})  # state is made, pages are touched
            for turn in range(options.rounds):
                for name in rotated(list(groups), turn + launch):
                    answer = groups[name].ask({"steps": options.steps})[0]
                    rates.setdefault(name, []).append(answer["bytes"] / answer["seconds"])
    return {"rates": rates, "skipped": skipped, "facts": facts}


def _start(name: str, options: argparse.Namespace) -> WorkerGroup:
    arguments = {"system": name, "elements": options.elements, "tensors": options.tensors}
    python = options.deepspeed_python if name == "deepspeed" else sys.executable
    threads, timeout = options.threads, float(options.timeout)
    return WorkerGroup(name, JOB, arguments, python=python, world=1, threads=threads, timeout=timeout)


def summary(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rates: dict[str, list[float]] = measured["rates"]
    rows: dict[str, dict[str, Any]] = {}
    for name, values in rates.items():
        ratio = {other: paired_ratio(values, rates[other]) for other in (REFERENCE, "copy") if other in rates}
        rows[name] = {"gigabytes_per_second": statistics.median(values) / 1e9, "ratio": ratio}
    return rows


def render(rows: dict[str, dict[str, Any]], skipped: dict[str, str]) -> str:
    def ratio(row: dict[str, Any], to: str) -> list[str]:
        found = row["ratio"].get(to, {})
        return [number(found.get("median"), ".2f"), f"{number(found.get('low'), '.2f')}-{number(found.get('high'), '.2f')}"]

    cells = [[name, f"{row['gigabytes_per_second']:.1f}", *ratio(row, REFERENCE), ratio(row, "copy")[0]] for name, row in rows.items()]
    text = table(["AdamW step, fp32", "GB/s", "/ torch fused", "quartiles", "/ copy"], cells)
    missing = [f"{name}: not measured: {reason.splitlines()[0]}" for name, reason in skipped.items()]
    return "\n".join([text, *missing])


def plot(rows: dict[str, dict[str, Any]], path: Path) -> bool:
    """A bar for each system; false where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    names = list(rows)
    bars = axes.barh(names[::-1], [rows[n]["gigabytes_per_second"] for n in names][::-1], color="#4878a8")
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_xlabel("GB/s of memory read and written")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    where = machine()
    if warning := idle_warning(where):
        say(warning)
    measured = measure(options)
    rows = summary(measured)
    write(render(rows, measured["skipped"]))
    if options.json is not None:
        settings = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
        write_json(options.json, {"machine": where, "settings": settings, "summary": rows, **measured})
    if options.plot is not None and not plot(rows, options.plot):
        say("no plot: matplotlib is not installed")
    return 0 if "zeroengine" in rows else 1


if __name__ == "__main__":
    sys.exit(main())
