"""`python -m benchmarks.context`: a causal transformer over a sequence that ranks share, by placement and number of ranks.

For every number of ranks the ring with the zigzag placement, the ring with the contiguous one, and Ulysses take turns; reported
are medians over the rounds, ratios to the zigzag round by round, and what each rank computes and keeps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
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
from zeroengine.arguments import positive, positive_numbers

_DESCRIPTION = "Zigzag ring, contiguous ring and Ulysses: time, balance and activation memory."
_SYSTEMS = ("zigzag", "contiguous", "ulysses")
_MIB = 1 << 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.context", description=_DESCRIPTION)
    add = parser.add_argument
    add("--ranks", type=positive_numbers, default=[1, 2, 4], help="comma-separated (default 1,2,4)")
    add("--tokens", type=positive, default=4096, help="length of the sequence (default %(default)s)")
    add("--width", type=positive, default=128, help="width of the model (default %(default)s)")
    add("--heads", type=positive, default=8, help="query heads (default %(default)s)")
    add("--key-heads", type=positive, default=4, help="key heads (default %(default)s)")
    add("--layers", type=positive, default=2, help="blocks (default %(default)s)")
    add("--rounds", type=positive, default=5, help="turns of each system (default %(default)s)")
    add("--steps", type=positive, default=1, help="steps of a turn (default %(default)s)")
    add("--timeout", type=float, default=120.0, help="seconds in which ranks must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    return parser


def measure(group: WorkerGroup, rounds: int, steps: int) -> dict[str, dict[str, list[Any]]]:
    """By system: `seconds` of a step of the slowest rank, one a round (the first round is not counted); of the last round the
    `pairs` and `kept` of every rank."""
    found: dict[str, dict[str, list[Any]]] = {system: {"seconds": []} for system in _SYSTEMS}
    for turn in range(rounds + 1):
        for system in rotated(_SYSTEMS, turn):
            answers = group.ask({"system": system, "steps": steps})
            if turn:
                each = [max(ranks) for ranks in zip(*(a["seconds"] for a in answers), strict=True)]
                found[system]["seconds"].append(statistics.median(each))
            for what in ("pairs", "kept"):
                found[system][what] = [a[what] for a in answers]
    return found


def summarize(found: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, Any]]:
    """By system: median seconds, their ratio to the zigzag, causal work (largest over mean of the ranks), and the largest
    activation memory of a rank in bytes."""
    rows = {}
    for system, each in found.items():
        rows[system] = {
            "seconds": statistics.median(each["seconds"]),
            "over_zigzag": paired_ratio(each["seconds"], found["zigzag"]["seconds"]),
            "imbalance": max(each["pairs"]) / statistics.fmean(each["pairs"]),
            "kept": max(each["kept"]),
            "raw": each,
        }
    return rows


def render(results: dict[int, dict[str, dict[str, Any]]]) -> str:
    header = ["ranks", "system", "step ms", "÷ zigzag", "work: largest ÷ mean", "activations MiB"]
    rows = []
    for ranks, systems in results.items():
        for system, r in systems.items():
            rows.append([
                str(ranks), system, number(r["seconds"] * 1e3, ".0f"), number(r["over_zigzag"]["median"], ".2f"),
                number(r["imbalance"], ".3f"), number(r["kept"] / _MIB, ".1f"),
            ])  # fmt: skip
    return table(header, rows)


def run(args: argparse.Namespace) -> dict[int, dict[str, dict[str, Any]]]:
    shape = {"length": args.tokens, "width": args.width, "heads": args.heads, "key_heads": args.key_heads, "layers": args.layers}
    results = {}
    for ranks in args.ranks:
        with WorkerGroup(
            f"{ranks} ranks", "benchmarks.context_worker:ContextJob", shape,
            python=sys.executable, world=ranks, threads=1, timeout=args.timeout,
        ) as group:  # fmt: skip
            results[ranks] = summarize(measure(group, args.rounds, args.steps))
        say(f"{ranks} ranks")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.width % args.heads or args.heads % args.key_heads:
        parser.error(f"--heads {args.heads} must divide --width {args.width} and be a multiple of --key-heads {args.key_heads}")
    facts = machine()
    warning = idle_warning(facts)
    if warning:
        write(warning)
    results = run(args)
    write(render(results))
    if args.json:
        chosen = {name: value for name, value in vars(args).items() if name != "json"}
        write_json(args.json, {"settings": chosen, "machine": facts, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
