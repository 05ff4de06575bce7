"""`python -m benchmarks.offload`: how fast the disk tier moves data beside `dd`, and what offload costs a step beside DeepSpeed's.

First, in the folder given, `dd` with direct I/O and our file access take turns on files of the same size that exist already.
Then every system trains the same model, in turns; each round is compared with the same engine without offload.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import which
from typing import Any

from benchmarks.harness import idle_warning, machine, number, paired_ratio, rotated, say, table, write, write_json
from benchmarks.rounds import REFERENCE, Outcome, Plan, Record, Rounds, training_need, training_starter
from benchmarks.settings import Settings
from zeroengine.arguments import positive

SYSTEMS = (
    "zeroengine-2", "zeroengine-2-cpu", "zeroengine-2-nvme", "deepspeed-2-cpu",
    "zeroengine-3", "zeroengine-3-cpu", "zeroengine-3-nvme", "deepspeed-3-cpu", "deepspeed-3-nvme",
)  # fmt: skip
_MIB, _GIB = 1 << 20, 1 << 30


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    base = Settings()
    parser = argparse.ArgumentParser("python -m benchmarks.offload", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="on the disk that is measured")
    add("--mib", type=positive, default=256, help="size of the files that are moved (default %(default)s MiB)")
    add("--rounds", type=positive, default=8, help="turns of each (default %(default)s)")
    add("--steps", type=positive, default=2, help="training steps of a turn (default %(default)s)")
    add("--systems", default=",".join(SYSTEMS), help="comma-separated; empty: only the disk (default: all)")
    add("--nproc", type=positive, default=base.nproc, help="processes of each system (default %(default)s)")
    add("--hidden", type=positive, default=base.hidden, help="width (default %(default)s)")
    add("--layers", type=positive, default=base.layers, help="transformer blocks (default %(default)s)")
    add("--vocab", type=positive, default=base.vocab, help="vocabulary (default %(default)s)")
    add("--sequence", type=positive, default=base.sequence, help="tokens of a sequence (default %(default)s)")
    add("--deepspeed-python", default=sys.executable, help="interpreter that has DeepSpeed (default: this one)")
    add("--timeout", type=float, default=600.0, help="seconds in which a system must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    options = parser.parse_args(argv)
    options.systems = [name for name in options.systems.split(",") if name]
    unknown = sorted(set(options.systems) - set(SYSTEMS))
    if unknown:
        parser.error(f"unknown systems {unknown}; known: {', '.join(SYSTEMS)}")
    return options


# --- the disk -----------------------------------------------------------------------------------------------------------


def _dd(path: Path, mib: int, *, writes: bool) -> None:
    ends = ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"] if writes else [f"if={path}", "of=/dev/null", "iflag=direct"]
    subprocess.run(["dd", *ends, "bs=1M", f"count={mib}"], check=True, capture_output=True)


class _Ours:
    """Our file access on one buffer, as a record of the disk tier uses it."""

    def __init__(self, path: Path, mib: int) -> None:
        import os

        from zeroengine.offload.buffers import disk_bytes
        from zeroengine.ops.aio import file_io, sums_for

        self.io = file_io(8, _MIB)
        self.memory = disk_bytes(mib * _MIB).random_(0, 256)
        self.sums = sums_for(mib * _MIB, _MIB)
        self.file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600), "r+b", buffering=0)

    def move(self, *, writes: bool) -> None:
        from zeroengine.ops.aio import READ, WRITE

        self.io.begin(WRITE if writes else READ, self.file, self.memory, 0, self.sums).wait()


def measure_disk(folder: Path, mib: int, rounds: int) -> dict[str, dict[str, Any]]:
    """By action: bytes a second of `dd` and of ours, round by round."""
    folder.mkdir(parents=True, exist_ok=True)
    theirs, mine = folder / "benchmark-dd.bin", folder / "benchmark-ours.bin"
    try:
        ours = _Ours(mine, mib)
        moves: dict[str, Callable[[], None]] = {
            "dd write": lambda: _dd(theirs, mib, writes=True), "ours write": lambda: ours.move(writes=True),
            "dd read": lambda: _dd(theirs, mib, writes=False), "ours read": lambda: ours.move(writes=False),
        }  # fmt: skip
        for move in moves.values():  # files come to be, pages are touched
            move()
        rates: dict[str, list[float]] = {name: [] for name in moves}
        for turn in range(rounds):
            for name in rotated(list(moves), turn):
                begin = time.perf_counter()
                moves[name]()
                rates[name].append(mib * _MIB / (time.perf_counter() - begin))
        return {
            action: {
                "dd": statistics.median(rates[f"dd {action}"]), "ours": statistics.median(rates[f"ours {action}"]),
                "ratio": paired_ratio(rates[f"ours {action}"], rates[f"dd {action}"]), "implementation": ours.io.implementation,
            }
            for action in ("write", "read")
        }  # fmt: skip
    finally:
        theirs.unlink(missing_ok=True)
        mine.unlink(missing_ok=True)


def render_disk(figures: dict[str, dict[str, Any]]) -> str:
    rows = [
        [action, f"{f['dd'] / 1e9:.2f}", f"{f['ours'] / 1e9:.2f}", number(f["ratio"]["median"], ".2f"),
         f"{f['ratio']['low']:.2f}-{f['ratio']['high']:.2f}"]
        for action, f in figures.items()
    ]  # fmt: skip
    return table(["direct I/O, 1 MiB blocks", "dd GB/s", "ours GB/s", "÷ dd", "quartiles"], rows)


# --- training -----------------------------------------------------------------------------------------------------------


def measure_steps(options: argparse.Namespace, settings: Settings) -> Outcome:
    start = training_starter(settings, options.deepspeed_python, options.timeout)
    return Rounds(Plan(options.rounds, options.steps, 2, training_need(settings), _GIB), start, say).run(options.systems)


def summarize(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """By system: step time, as a multiple of the same engine's without offload where it ran in the same wave, and memory."""
    result: dict[str, dict[str, Any]] = {}
    for wave in outcome.waves:
        everything: dict[str, Record] = {REFERENCE: wave.reference, **wave.systems}
        for name, record in everything.items():
            if name in result:
                continue
            plain = "zeroengine-" + name.split("-")[1] if name != REFERENCE else name
            beside = everything.get(plain)
            parameters = record.facts[0]["parameters"]
            result[name] = {
                "step_seconds": statistics.median(record.step_seconds),
                "over_limit": paired_ratio(record.round_seconds, wave.reference.round_seconds),
                "over_plain": paired_ratio(record.round_seconds, beside.round_seconds) if beside is not None else None,
                "resident_bytes_per_parameter": _per(record.resident, parameters),
                "last_loss": record.losses[-1],
                "report": record.report,
            }
    return result


def _per(sizes: list[int | None], parameters: int) -> float | None:
    known = [size for size in sizes if size is not None]
    return statistics.median(known) / parameters if known else None


def render_steps(rows: dict[str, dict[str, Any]]) -> str:
    cells = [
        [name, f"{r['step_seconds']:.3f}", number(r["over_limit"]["median"], ".2f"),
         number(r["over_plain"] and r["over_plain"]["median"], ".2f"), number(r["resident_bytes_per_parameter"], ".1f"),
         f"{r['last_loss']:.6f}"]
        for name, r in rows.items()
    ]  # fmt: skip
    return table(["system", "step s", "÷ limit", "÷ no offload", "resident B/param", "last loss"], cells)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    facts = machine()
    if warning := idle_warning(facts):
        say(warning)
    result: dict[str, Any] = {"machine": facts}
    if which("dd") is None:
        say("no bandwidth: this machine has no dd")
    else:
        result["disk"] = measure_disk(options.folder, options.mib, options.rounds)
        write(render_disk(result["disk"]))
    failed: dict[str, str] = {}
    if options.systems:
        settings = Settings(
            hidden=options.hidden, layers=options.layers, vocab=options.vocab, sequence=options.sequence, nproc=options.nproc,
            folder=str(options.folder),
        )  # fmt: skip
        outcome = measure_steps(options, settings)
        result["settings"], result["systems"] = settings.to_json(), summarize(outcome)
        result["skipped"], result["failed"] = outcome.skipped, failed = outcome.skipped, outcome.failed
        write(render_steps(result["systems"]))
        for name, reason in {**outcome.skipped, **outcome.failed}.items():
            write(f"{name}: not measured: {reason.strip().splitlines()[-1]}")
    if options.json is not None:
        write_json(options.json, result)
    return 1 if any(name.startswith("zeroengine") for name in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
