"""`python -m benchmarks.compare`: step time, memory, loss and bytes moved of zeroengine and its peers, side by side.

Every system is a set of processes of its own that lives through the run; in each round every system has one turn, and
is compared with the `limit` (the same processes without communication) of that very round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, get_args

from benchmarks.harness import (
    idle_warning,
    machine,
    number,
    paired_ratio,
    say,
    table,
    write,
    write_json,
)
from benchmarks.rounds import REFERENCE, Outcome, Plan, Record, Rounds, training_need, training_starter
from benchmarks.settings import DeepSpeedAdam, Dtype, Settings
from zeroengine.arguments import positive

_DESCRIPTION = "Step time, memory, loss and bytes moved of zeroengine and its peers, side by side."
_LOSS_REFERENCE = "ddp"
_GIB = 1 << 30
# rivals stand next to each other, so that they share a wave when not all fit into memory
ALL_SYSTEMS = (
    "ddp", "zeroengine-0", "fsdp2", "zeroengine-3", "deepspeed-3",
    "zeroengine-1", "deepspeed-1", "zeroengine-2", "deepspeed-2",
)  # fmt: skip
_GROUPS = {
    "deepspeed": ("deepspeed-1", "deepspeed-2", "deepspeed-3"),
    "zeroengine": ("zeroengine-0", "zeroengine-1", "zeroengine-2", "zeroengine-3"),
}
_ROW_ORDER = ("ddp", "fsdp2", *_GROUPS["deepspeed"], *_GROUPS["zeroengine"])


def _systems(text: str) -> list[str]:
    """Names in the order of `ALL_SYSTEMS`; `deepspeed` and `zeroengine` stand for all their stages."""
    wanted: set[str] = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name != REFERENCE and name not in ALL_SYSTEMS and name not in _GROUPS:
            known = ", ".join([REFERENCE, *_ROW_ORDER, *_GROUPS])
            raise argparse.ArgumentTypeError(f"unknown system {name!r}; known: {known}")
        wanted.update(_GROUPS.get(name, (name,)))
    return [name for name in ALL_SYSTEMS if name in wanted]


def _parser() -> argparse.ArgumentParser:
    base = Settings()
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description=_DESCRIPTION)
    add = parser.add_argument
    add("--systems", type=_systems, default=list(ALL_SYSTEMS), help="comma-separated; `limit` always runs too")
    add("--nproc", type=positive, default=base.nproc, help="processes of each system (default %(default)s)")
    add("--threads", type=positive, default=base.threads, help="threads of each process (default %(default)s)")
    add("--rounds", type=positive, default=10, help="turns of each system (default %(default)s)")
    add("--steps", type=positive, default=2, help="training steps of a turn (default %(default)s)")
    add("--warmup", type=positive, default=2, help="steps before the first turn, not counted (default %(default)s)")
    add("--dtype", choices=get_args(Dtype), default=base.dtype, help="bf16 keeps fp32 masters (default %(default)s)")
    add("--accumulation", type=positive, default=base.accumulation, help="micro-batches a step (default %(default)s)")
    add("--micro-batch", type=positive, default=base.micro_batch, help="sequences of each (default %(default)s)")
    add("--sequence", type=positive, default=base.sequence, help="tokens of a sequence (default %(default)s)")
    add("--hidden", type=positive, default=base.hidden, help="width (default %(default)s)")
    add("--layers", type=positive, default=base.layers, help="transformer blocks (default %(default)s)")
    add("--vocab", type=positive, default=base.vocab, help="vocabulary (default %(default)s)")
    add("--deepspeed-python", default=sys.executable, help="interpreter that has DeepSpeed (default: this one)")
    add(
        "--deepspeed-adam", choices=get_args(DeepSpeedAdam), default=base.deepspeed_adam,
        help="torch's fused AdamW, torch's default AdamW, or DeepSpeed's own CPU Adam, which it compiles on first use",
    )  # fmt: skip
    add("--reserve-gib", type=float, default=1.5, help="memory to leave free; more systems go into another wave")
    add("--timeout", type=float, default=900.0, help="seconds in which a system must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    add("--plot", type=Path, help="draw step time and memory here (needs matplotlib)")
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    names = (
        "hidden", "layers", "vocab", "sequence", "micro_batch", "accumulation", "dtype", "nproc", "threads",
        "deepspeed_adam",
    )  # fmt: skip
    return Settings(**{name: getattr(args, name) for name in names})


def _formula(name: str, settings: Settings, parameters: int) -> float | None:
    """Bytes that a rank must send in an fp32 step without accumulation; None for what the formula does not cover."""
    family, _, stage = name.partition("-")
    if family != "zeroengine" or settings.dtype != "fp32" or settings.accumulation != 1:
        return None
    passes = 3 if stage == "3" else 2
    return passes * 4 * parameters * (settings.nproc - 1) / settings.nproc


def _loss_difference(record: Record, reference: Record | None) -> float | None:
    """Largest relative difference of the loss from the reference's, over the steps that both did."""
    if reference is None:
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(record.losses, reference.losses, strict=False))


def _summary(name: str, record: Record, limit: Record, losses: Record | None, settings: Settings) -> dict[str, Any]:
    parameters = record.facts[0]["parameters"]
    resident = [r for r in record.resident if r is not None]
    peak = [p for p in record.peak if p is not None]
    sent = [s for s in record.sent if s is not None]
    return {
        "step_seconds": statistics.median(record.step_seconds),
        "over_limit": paired_ratio(record.round_seconds, limit.round_seconds),
        "resident_bytes_per_parameter": statistics.median(resident) / parameters if resident else None,
        "peak_bytes_per_parameter": max(peak) / parameters if peak else None,
        "first_loss": record.losses[0],
        "last_loss": record.losses[-1],
        "loss_difference": _loss_difference(record, losses),
        "sent_bytes": statistics.median(each["total"] for each in sent) if sent else None,
        "sent_formula_bytes": _formula(name, settings, parameters),
        "loopback_bytes": statistics.median(record.loopback) if record.loopback else None,
        "parameters": parameters,
        "raw": asdict(record),
    }


def summarize(outcome: Outcome, settings: Settings) -> dict[str, dict[str, Any]]:
    """Figures by system in the order of the table. The limit's are those of the first wave."""
    everything = {name: (record, wave.reference) for wave in outcome.waves for name, record in wave.systems.items()}
    losses = everything[_LOSS_REFERENCE][0] if _LOSS_REFERENCE in everything else None
    first = outcome.waves[0].reference
    result = {REFERENCE: _summary(REFERENCE, first, first, None, settings)}
    for name in _ROW_ORDER:
        if name in everything:
            record, limit = everything[name]
            result[name] = _summary(name, record, limit, losses, settings)
    return result


def render(summary: dict[str, dict[str, Any]]) -> str:
    header = [
        "system", "step s", "÷ limit", "quartiles", "resident B/param", "peak B/param", "last loss", "from ddp",
        "sent MB", "formula MB", "loopback MB",
    ]  # fmt: skip
    rows = []
    for name, s in summary.items():
        ratio = s["over_limit"]
        moved = [s[key] for key in ("sent_bytes", "sent_formula_bytes", "loopback_bytes")]
        rows.append([
            name, number(s["step_seconds"], ".3f"), number(ratio["median"], ".2f"),
            f"{ratio['low']:.2f}-{ratio['high']:.2f}", number(s["resident_bytes_per_parameter"], ".1f"),
            number(s["peak_bytes_per_parameter"], ".1f"), number(s["last_loss"], ".5f"),
            number(s["loss_difference"], ".0e"), *(number(m and m / 1e6, ".1f") for m in moved),
        ])  # fmt: skip
    return table(header, rows)


def _plot(summary: dict[str, dict[str, Any]], path: Path) -> None:
    import_module("matplotlib").use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")

    names = list(summary)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.45 * len(names) + 1.5), sharey=True)
    ratios = [summary[n]["over_limit"] for n in names]
    medians = [r["median"] for r in ratios]
    spread = [[r["median"] - r["low"] for r in ratios], [r["high"] - r["median"] for r in ratios]]
    left.barh(names, medians, xerr=spread, color="#4477aa")
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("step time ÷ limit (median of rounds, quartiles)")
    left.invert_yaxis()
    for label, color in (("peak", "#ddccaa"), ("resident", "#228833")):
        values = [summary[n][f"{label}_bytes_per_parameter"] or 0 for n in names]
        right.barh(names, values, color=color, label=label)
    right.set_xlabel("bytes per parameter")
    right.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _conclude(outcome: Outcome, settings: Settings, facts: dict[str, Any], args: argparse.Namespace) -> int:
    summary = summarize(outcome, settings)
    write(render(summary))
    if len(outcome.waves) > 1:
        waves = "; ".join(", ".join(wave.systems) for wave in outcome.waves)
        write(f"not all fit into memory at once, so they ran in waves, each beside the limit: {waves}")
    for name, reason in outcome.skipped.items():
        write(f"{name} left out: {reason}")
    for name, error in outcome.failed.items():
        write(f"{name} FAILED: {error}")
    if args.json:
        result = {
            "settings": settings.to_json(), "machine": facts, "waves": [list(wave.systems) for wave in outcome.waves],
            "systems": summary, "skipped": outcome.skipped, "failed": outcome.failed,
        }  # fmt: skip
        write_json(args.json, result)
    if args.plot:
        _plot(summary, args.plot)
    return 1 if outcome.failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        settings = _settings(args)
    except ValueError as error:
        parser.error(str(error))
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave it out")
    if which(args.deepspeed_python) is None:
        parser.error(f"--deepspeed-python {args.deepspeed_python}: no such program")

    facts = machine()
    write(
        f"{settings.parameters / 1e6:.1f} M parameters, {settings.dtype}, "
        f"{settings.nproc} processes x {settings.threads} threads, "
        f"{settings.accumulation} x {settings.micro_batch} x {settings.sequence} tokens a step and process, "
        f"{args.rounds} rounds x {args.steps} steps"
    )
    warning = idle_warning(facts)
    if warning:
        write(warning)

    plan = Plan(args.rounds, args.steps, args.warmup, training_need(settings), int(args.reserve_gib * _GIB))
    outcome = Rounds(plan, training_starter(settings, args.deepspeed_python, args.timeout), say).run(args.systems)
    return _conclude(outcome, settings, facts, args)


if __name__ == "__main__":
    sys.exit(main())
