"""`python -m benchmarks.collectives`: collectives between processes of this host, ours against Gloo, a plain copy, and what the machine's
memory allows. `message`: each rank sends the tensor to the next one.

For every size and operation the systems take turns; reported are medians over the rounds and the ratio of Gloo to ours,
round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

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
from benchmarks.moving import SYSTEMS
from zeroengine.arguments import positive, positive_numbers

_DESCRIPTION = "Collectives through shared memory against Gloo, memcpy and what the memory allows."
_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "message")
_RATIOS = ("gloo_over_shared", "gloo_over_staged", "gloo_over_limit", "shared_over_memcpy", "shared_over_limit")
_MIB = 1 << 20
Times = dict[str, list[float]]


def _operations(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(_OPERATIONS):
        raise argparse.ArgumentTypeError(f"operations {text!r}; they are a comma-separated choice of {_OPERATIONS}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.collectives", description=_DESCRIPTION)
    add = parser.add_argument
    add("--ranks", type=positive_numbers, default=[2, 4], help="comma-separated (default 2,4)")
    add("--mib", type=positive_numbers, default=[1, 16, 64], help="sizes of the full tensor in MiB (default 1,16,64)")
    add("--operations", type=_operations, default=list(_OPERATIONS), help="comma-separated (default: all)")
    add("--rounds", type=positive, default=7, help="turns of each system (default %(default)s)")
    add("--repeats", type=positive, default=3, help="repetitions of a turn (default %(default)s)")
    add("--timeout", type=float, default=120.0, help="seconds in which ranks must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    add("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    return parser


def measure(group: WorkerGroup, operation: str, size: int, rounds: int, repeats: int) -> Times:
    """By system: one time a round, of the slowest rank, the median of its repetitions. The first round is not counted."""
    times: Times = {system: [] for system in SYSTEMS}
    for turn in range(rounds + 1):
        for system in rotated(SYSTEMS, turn):
            answers = group.ask({"system": system, "operation": operation, "size": size, "repeats": repeats})
            slowest = [max(pair) for pair in zip(*(a["seconds"] for a in answers), strict=True)]
            if turn:
                times[system].append(statistics.median(slowest))
    return times


def summarize(times: Times) -> dict[str, Any]:
    """Medians in seconds, and paired ratios: how many times faster than Gloo, how many copies of the tensor long, and how many times as
    long as the machine's memory allows."""
    return {
        "seconds": {system: statistics.median(values) for system, values in times.items()},
        **{name: paired_ratio(*(times[system] for system in name.split("_over_"))) for name in _RATIOS},
        "raw": times,
    }


def render(results: list[dict[str, Any]]) -> str:
    header = [
        "operation", "ranks", "MiB", *(f"{system} ms" for system in SYSTEMS), *(name.replace("_over_", " ÷ ") for name in _RATIOS),
    ]  # fmt: skip
    rows = []
    for r in results:
        milliseconds = [number(r["seconds"][system] * 1e3, ".2f") for system in SYSTEMS]
        ratios = [r[name]["median"] for name in _RATIOS]
        rows.append([r["operation"], str(r["ranks"]), str(r["mib"]), *milliseconds, *(number(x, ".1f") for x in ratios)])
    return table(header, rows)


def _plot(results: list[dict[str, Any]], path: Path) -> None:
    import_module("matplotlib").use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")

    names = [f"{r['operation']}, {r['ranks']} ranks, {r['mib']} MiB" for r in results]
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(names) + 1.5))
    for name, color in (("gloo_over_staged", "#ddccaa"), ("gloo_over_shared", "#4477aa"), ("gloo_over_limit", "#cccccc")):
        axes.barh(names, [r[name]["median"] for r in results], color=color, label=name.rpartition("_")[2])
    axes.axvline(10.0, color="black", linewidth=0.8)
    axes.set_xlabel("times faster than Gloo (median of rounds)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for ranks in args.ranks:
        sizes = [mib * _MIB for mib in args.mib]
        with WorkerGroup(
            f"{ranks} ranks", "benchmarks.moving:MovingJob", {"sizes": sizes},
            python=sys.executable, world=ranks, threads=1, timeout=args.timeout,
        ) as group:  # fmt: skip
            over = group.facts[0]["moves_over"]
            if over != "shared memory":
                write(f"note: these ranks move data over {over}; `shared` and `staged` measure that")
            for operation in args.operations:
                for mib, size in zip(args.mib, sizes, strict=True):
                    times = measure(group, operation, size, args.rounds, args.repeats)
                    results.append({"operation": operation, "ranks": ranks, "mib": mib, **summarize(times)})
                say(f"{ranks} ranks: {operation}")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    facts = machine()
    warning = idle_warning(facts)
    if warning:
        write(warning)
    results = run(args)
    write(render(results))
    if args.json:
        chosen = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
        write_json(args.json, {"settings": chosen, "machine": facts, "results": results})
    if args.plot:
        _plot(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
