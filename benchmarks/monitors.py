"""`python -m benchmarks.monitors`: what monitors cost, switched off and switched on.

Two ranks train a GPT on one engine, whose observers are taken off and put on between turns: *bare* (the calls to observers
replaced by nothing), *off* (no observer, the default) and *on* (every monitor that runs at each step). Reported: off over bare,
and on over off, step by step of the slowest rank, paired round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import WorkerGroup, idle_warning, machine, number, paired_ratio, rotated, say, table, write, write_json
from benchmarks.settings import Settings
from zeroengine.arguments import positive

_MODES = ("bare", "off", "on")
_STAGES = (0, 1, 2, 3)


def _stages(text: str) -> list[int]:
    try:
        stages = sorted({int(part) for part in text.split(",")})
    except ValueError:
        stages = []
    if not stages or not set(stages) <= set(_STAGES):
        raise argparse.ArgumentTypeError(f"stages {text!r}; they are a comma-separated choice of 0, 1, 2, 3")
    return stages


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.monitors", description="The time that monitors cost.")
    add = parser.add_argument
    add("--stages", type=_stages, default=[1, 3], help="ZeRO stages, comma-separated (default 1,3)")
    add("--hidden", type=positive, default=384, help="width of the model (default %(default)s)")
    add("--layers", type=positive, default=6, help="blocks of the model (default %(default)s)")
    add("--vocab", type=positive, default=4096, help="size of the vocabulary (default %(default)s)")
    add("--sequence", type=positive, default=128, help="tokens of a sample (default %(default)s)")
    add("--nproc", type=positive, default=2, help="ranks (default %(default)s)")
    add("--rounds", type=positive, default=30, help="turns of each mode (default %(default)s)")
    add("--steps", type=positive, default=5, help="training steps of a turn (default %(default)s)")
    add("--warmup", type=positive, default=5, help="steps before the first turn, not counted (default %(default)s)")
    add("--timeout", type=float, default=300.0, help="seconds in which a process must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    return parser


Times = dict[str, list[float]]


def measure(args: argparse.Namespace, stage: int) -> tuple[Times, dict[str, Any]]:
    """Seconds a step by mode, one value a round: the median over a turn's steps of the slowest rank."""
    settings = Settings(args.hidden, args.layers, args.vocab, args.sequence, nproc=args.nproc)
    packages = ["tensorboard"] if find_spec("tensorboard") else []
    arguments = {"settings": settings.to_json(), "stage": stage, "packages": packages}
    times: Times = {mode: [] for mode in _MODES}
    with WorkerGroup(
        f"stage {stage}", "benchmarks.monitors_worker:MonitoredJob", arguments,
        python=sys.executable, world=args.nproc, threads=1, timeout=args.timeout,
    ) as group:  # fmt: skip
        group.ask({"mode": "on", "steps": args.warmup})
        for turn in range(args.rounds):
            for mode in rotated(_MODES, turn):
                answers = group.ask({"mode": mode, "steps": args.steps})
                each = zip(*(a["seconds"] for a in answers), strict=True)
                times[mode].append(statistics.median(max(step) for step in each))
        say(f"stage {stage}: {args.rounds} rounds")
        return times, group.facts[0]


def summarize(times: Times) -> dict[str, Any]:
    """Medians in seconds, and the paired ratios."""
    return {
        **{mode: statistics.median(times[mode]) for mode in _MODES},
        "off_over_bare": paired_ratio(times["off"], times["bare"]),
        "on_over_off": paired_ratio(times["on"], times["off"]),
        "raw": times,
    }


def render(summary: dict[str, dict[str, Any]]) -> str:
    rows = []
    for stage, s in summary.items():
        cells = [number(s[mode] * 1e3, ".2f") for mode in _MODES]
        for ratio in (s["off_over_bare"], s["on_over_off"]):
            cells += [number(100 * (ratio["median"] - 1), "+.2f"), f"{100 * (ratio['low'] - 1):+.2f} to {100 * (ratio['high'] - 1):+.2f}"]
        rows.append([stage, *cells])
    head = ["stage", "bare ms", "off ms", "on ms", "off cost %", "quartiles", "on cost %", "quartiles"]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    facts = machine()
    warning = idle_warning(facts)
    if warning:
        write(warning)
    summary, first = {}, {}
    for stage in args.stages:
        times, first = measure(args, stage)
        summary[str(stage)] = summarize(times)
    write(f"{first['parameters']:,} parameters; on: {', '.join(first['observers'])}")
    write(render(summary))
    if args.json:
        chosen = {name: value for name, value in vars(args).items() if name != "json"}
        write_json(args.json, {"settings": chosen, "machine": facts, "observers": first["observers"], "stages": summary})
    return 0


if __name__ == "__main__":
    sys.exit(main())
