"""`python -m benchmarks.moe`: layers with experts of zeroengine and of DeepSpeed on one shape, in turns.

Both use the same module as expert, the same optimizer and ZeRO stage, and every process shares the experts with all others.
`zeroengine` has the experts as a bank, `zeroengine-list` as the same modules that DeepSpeed is given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

from benchmarks.harness import WorkerGroup, idle_warning, machine, number, paired_ratio, steps_in_turns, table, write, write_json
from zeroengine.arguments import positive

SYSTEMS = ("deepspeed", "zeroengine", "zeroengine-list")
_MIB = 1 << 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.moe", description=__doc__)
    add = parser.add_argument
    add("--systems", default=",".join(SYSTEMS), help="comma-separated (default %(default)s)")
    add("--nproc", type=positive, default=2, help="processes of each system (default %(default)s)")
    add("--threads", type=positive, default=1, help="threads of each process (default %(default)s)")
    add("--rounds", type=positive, default=10, help="turns of each system (default %(default)s)")
    add("--steps", type=positive, default=2, help="steps of a turn (default %(default)s)")
    add("--hidden", type=positive, default=256, help="width (default %(default)s)")
    add("--intermediate", type=positive, default=1024, help="width inside an expert (default %(default)s)")
    add("--experts", type=positive, default=8, help="experts of a layer (default %(default)s)")
    add("--layers", type=positive, default=2, help="layers (default %(default)s)")
    add("--tokens", type=positive, default=1024, help="tokens of a process and step (default %(default)s)")
    add("--k", type=positive, default=2, help="experts of a token (default %(default)s)")
    add("--capacity", type=float, default=0.0, help="capacity factor; 0 drops nothing (default %(default)s)")
    add("--stage", type=int, choices=(0, 1, 2), default=1, help="ZeRO stage; DeepSpeed has experts up to 2 (default %(default)s)")
    add("--deepspeed-python", default=sys.executable, help="interpreter that has DeepSpeed (default: this one)")
    add("--timeout", type=float, default=600.0, help="seconds in which a system must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    return parser


def _start(name: str, args: argparse.Namespace) -> WorkerGroup:
    names = ("nproc", "threads", "hidden", "intermediate", "experts", "layers", "tokens", "k", "capacity", "stage")
    python = args.deepspeed_python if name == "deepspeed" else sys.executable
    return WorkerGroup(
        name, "benchmarks.moe_worker:MoeJob", {"system": name, "shape": {n: getattr(args, n) for n in names}},
        python=python, world=args.nproc, threads=args.threads, timeout=args.timeout,
    )  # fmt: skip


def _measure(args: argparse.Namespace, wanted: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Figures by system, and why others have none."""
    return steps_in_turns(wanted, lambda name: _start(name, args), args.rounds, args.steps, _figures)


def _figures(group: WorkerGroup, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    planned = [facts["planned"] for facts in group.facts]
    return {
        "round_seconds": [max(sum(a["seconds"]) for a in answers) / len(answers[0]["seconds"]) for answers in rounds],
        "resident": [[a["resident"] for a in answers] for answers in rounds][-1],
        "peak": [[a["peak"] for a in answers] for answers in rounds][-1],
        "planned": [sum(p.values()) for p in planned] if all(planned) else None,
        "held": [a["held"] for a in rounds[-1]] if all(planned) else None,
        "loss": statistics.fmean(loss for a in rounds[-1] for loss in a["losses"]),
    }


def _show(figures: dict[str, dict[str, Any]], reference: str) -> str:
    rows = []
    for name, f in figures.items():
        ratio = paired_ratio(f["round_seconds"], figures[reference]["round_seconds"])
        planned = max(f["planned"]) / _MIB if f["planned"] else None
        held = max(f["held"]) / _MIB if f["held"] else None
        peak = max(f["peak"]) / _MIB if all(p is not None for p in f["peak"]) else None
        step = 1000 * statistics.median(f["round_seconds"])
        spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        rows.append([
            name, f"{step:.1f}", f"{ratio['median']:.2f}", spread, f"{max(f['resident']) / _MIB:.0f}", number(peak, ".0f"),
            number(planned, ".2f"), number(held, ".2f"), f"{f['loss']:.5f}",
        ])  # fmt: skip
    heads = ["system", "step ms", f"÷ {reference}", "quartiles", "resident MiB", "peak MiB", "states planned MiB", "held MiB", "loss"]
    return table(heads, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    wanted = [name.strip() for name in args.systems.split(",")]
    unknown = [name for name in wanted if name not in SYSTEMS]
    if unknown:
        parser.error(f"--systems {', '.join(unknown)}: known are {', '.join(SYSTEMS)}")
    if args.experts % args.nproc or args.k > args.experts:
        parser.error("--experts must be a multiple of --nproc and at least --k")
    if which(args.deepspeed_python) is None:
        parser.error(f"--deepspeed-python {args.deepspeed_python}: no such program")
    facts = machine()
    warning = idle_warning(facts)
    if warning:
        write(warning)
    figures, missing = _measure(args, wanted)
    if figures:
        write(_show(figures, "deepspeed" if "deepspeed" in figures else next(iter(figures))))
    for name, reason in missing.items():
        write(f"{name} left out: {reason}")
    if args.json:
        shape = {name: str(value) for name, value in vars(args).items()}
        write_json(args.json, {"machine": facts, "arguments": shape, "systems": figures, "missing": missing})
    return 0 if figures else 1


if __name__ == "__main__":
    sys.exit(main())
