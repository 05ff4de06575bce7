"""`python -m benchmarks.pipeline`: pipelines beside torch.distributed.pipelining and DeepSpeed, and schedules against arithmetic.

Two measurements. *Idle time*: layers that sleep run under every schedule, and the share of time in which ranks do not compute is
compared with what the schedule says for equal layers and free messages. *Step time*: the same GPT, cut alike, under each system in
turns; reported are medians and the ratio to the reference round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

from benchmarks.harness import WorkerGroup, idle_warning, machine, paired_ratio, say, steps_in_turns, table, write, write_json
from benchmarks.settings import Settings
from zeroengine.arguments import positive, positive_numbers

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
CHUNKS = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "interleaved": 2, "zero-bubble": 2, "zb-v": 2, "dualpipe-v": 2}
SYSTEMS = (
    "torch-1f1b", "zeroengine-1f1b", "deepspeed-1f1b", "torch-interleaved", "zeroengine-interleaved", "zeroengine-zb-h1",
    "torch-zero-bubble", "torch-zb-v", "zeroengine-zb-v",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", choices=("idle", "steps"), help="one of the two measurements (default: both)")
    add("--schedules", default=",".join(SCHEDULES), help="whose idle time is measured (default %(default)s)")
    add("--stages", type=positive, default=4, help="ranks of that pipeline (default %(default)s)")
    add("--micro-batches", type=positive_numbers, default=[4, 8, 16], help="of that pipeline, comma-separated (default 4,8,16)")
    add("--sleep", type=float, default=0.08, help="seconds of a rank's forward of a micro-batch there (default %(default)s)")
    add("--systems", default=",".join(SYSTEMS), help="whose steps are timed; the first is the reference (default %(default)s)")
    add("--nproc", type=positive, default=2, help="stages and processes of each system (default %(default)s)")
    add("--threads", type=positive, default=1, help="threads of each process (default %(default)s)")
    add("--rounds", type=positive, default=8, help="turns of each system (default %(default)s)")
    add("--steps", type=positive, default=2, help="steps of a turn (default %(default)s)")
    add("--hidden", type=positive, default=512, help="width (default %(default)s)")
    add("--layers", type=positive, default=8, help="blocks (default %(default)s)")
    add("--vocab", type=positive, default=2048, help="vocabulary (default %(default)s)")
    add("--sequence", type=positive, default=128, help="tokens of a sample (default %(default)s)")
    add("--micro-batch", type=positive, default=2, help="samples of a micro-batch (default %(default)s)")
    add("--accumulation", type=positive, default=8, help="micro-batches of a step (default %(default)s)")
    add("--deepspeed-python", default=sys.executable, help="interpreter that has DeepSpeed (default: this one)")
    add("--timeout", type=float, default=300.0, help="seconds in which a system must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    return parser


# --- idle time ----------------------------------------------------------------------------------------------------------


def measure_idle(args: argparse.Namespace, schedules: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each schedule and number of micro-batches: measured and computed idle share, medians of `--steps` steps."""
    rows = []
    with WorkerGroup(
        "schedules", "benchmarks.pipeline_worker:BubbleJob", {"ranks": args.stages},
        python=sys.executable, world=args.stages, threads=1, timeout=args.timeout,
    ) as group:  # fmt: skip
        for micro in args.micro_batches:
            for schedule in schedules:
                if fits(schedule, args.stages, micro):
                    request = {"schedule": schedule, "micro_batches": micro, "seconds": args.sleep, "steps": args.steps}
                    answer = group.ask(request)[0]
                    medians = {key: statistics.median(answer[key]) for key in ("measured", "computed")}
                    rows.append({"schedule": schedule, "micro_batches": micro, **medians, "raw": answer["measured"]})
            say(f"{micro} micro-batches")
    return rows


def fits(schedule: str, stages: int, micro_batches: int) -> bool:
    """Whether a schedule has that many micro-batches (see docs/pipeline.md)."""
    if schedule == "interleaved":
        return micro_batches % stages == 0
    return micro_batches >= 2 * stages if schedule == "dualpipe-v" else True


def show_idle(rows: Sequence[dict[str, Any]]) -> str:
    found = []
    for r in rows:
        longer = (1 - r["computed"]) / (1 - r["measured"])  # of the whole step, over that of the arithmetic
        found.append([r["schedule"], str(r["micro_batches"]), f"{r['computed']:.1%}", f"{r['measured']:.1%}", f"{longer:.3f}"])
    return table(["schedule", "micro-batches", "idle computed", "idle measured", "time ÷ computed"], found)


# --- step time ----------------------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> Settings:
    names = ("hidden", "layers", "vocab", "sequence", "micro_batch", "accumulation", "nproc", "threads")
    return Settings(**{name: getattr(args, name) for name in names})


def measure_steps(args: argparse.Namespace, wanted: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Figures by system, and why others have none."""
    settings = _settings(args).to_json()

    def start(name: str) -> WorkerGroup:
        say(f"starting {name}")
        return WorkerGroup(
            name, "benchmarks.pipeline_worker:PipelineJob", {"name": name, "settings": settings},
            python=args.deepspeed_python if name.startswith("deepspeed") else sys.executable,
            world=args.nproc, threads=args.threads, timeout=args.timeout,
        )  # fmt: skip

    return steps_in_turns(wanted, start, args.rounds, args.steps, lambda group, rounds: _figures(rounds))


def _figures(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds of a step are those of the slowest rank."""
    idle = [answers[0]["idle"] for answers in rounds if answers[0]["idle"] is not None]
    losses = [loss for answers in rounds for a in answers for loss in a["losses"] if loss is not None]
    return {
        "round_seconds": [max(sum(a["seconds"]) for a in answers) / len(answers[0]["seconds"]) for answers in rounds],
        "idle": statistics.median(measured for measured, _ in idle) if idle else None,
        "idle_computed": statistics.median(computed for _, computed in idle) if idle else None,
        "loss": losses[-1] if losses else None,
    }


def show_steps(figures: dict[str, dict[str, Any]]) -> str:
    reference = next(iter(figures))
    rows = []
    for name, f in figures.items():
        ratio = paired_ratio(f["round_seconds"], figures[reference]["round_seconds"])
        share = ["-", "-"] if f["idle"] is None else [f"{f['idle']:.1%}", f"{f['idle_computed']:.1%}"]
        rows.append([
            name, f"{1000 * statistics.median(f['round_seconds']):.1f}", f"{ratio['median']:.3f}",
            f"{ratio['low']:.3f}-{ratio['high']:.3f}", *share, f"{f['loss']:.5f}",
        ])  # fmt: skip
    return table(["system", "step ms", f"÷ {reference}", "quartiles", "idle", "idle computed", "loss"], rows)


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> list[str]:
    wanted = [name.strip() for name in text.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"--{option} {', '.join(unknown)}: known are {', '.join(known)}")
    return wanted


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, systems: Sequence[str]) -> None:
    for name in systems:
        stages = args.nproc * CHUNKS[name.partition("-")[2]]
        if args.layers % stages:
            parser.error(f"--layers {args.layers} is no multiple of the {stages} stages of {name}")
        if not fits(name.partition("-")[2], args.nproc, args.accumulation):
            parser.error(f"--accumulation {args.accumulation} does not fit {name}")
    if which(args.deepspeed_python) is None:
        parser.error(f"--deepspeed-python {args.deepspeed_python}: no such program")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    schedules = _chosen(parser, "schedules", args.schedules, SCHEDULES)
    systems = _chosen(parser, "systems", args.systems, SYSTEMS)
    _check(parser, args, systems)
    facts = machine()
    warning = idle_warning(facts)
    if warning:
        write(warning)
    result: dict[str, Any] = {"machine": facts, "arguments": {name: str(value) for name, value in vars(args).items()}}
    if args.only != "steps":
        result["idle"] = measure_idle(args, schedules)
        write(show_idle(result["idle"]))
    if args.only != "idle":
        result["systems"], result["missing"] = measure_steps(args, systems)
        if result["systems"]:
            write(show_steps(result["systems"]))
        for name, reason in result["missing"].items():
            write(f"{name} left out: {reason}")
    if args.json:
        write_json(args.json, result)
    return 0 if args.only == "idle" or result["systems"] else 1


if __name__ == "__main__":
    sys.exit(main())
