"""Saving and loading beside `torch.save` and plain `torch.distributed.checkpoint`: MB/s of the same bytes, in turns. Then an
export of the weights, and what it takes of memory.

    python -m benchmarks.checkpoint --megabytes 400 --ranks 2 --rounds 5 --folder /some/disk
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue as queues
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from zeroengine.arguments import positive
from zeroengine.checkpoint import BackgroundSaver, SavedCheckpoint, export_weights, load, save
from zeroengine.zero.layout import BucketLayout, Piece

ROW = 1024
TENSORS = 33  # a multiple of three
SYSTEMS = ("torch.save", "dcp", "zeroengine", "zeroengine background")


class State:
    """This rank's share of `TENSORS` fp32 matrices in one bucket, in the form that each system takes: a third of them are weights and
    two thirds the moments of Adam, as in a checkpoint of fp32 training."""

    def __init__(self, megabytes: int, rank: int, world: int) -> None:
        rows = max(1, megabytes * 10**6 // (4 * ROW * TENSORS))
        layout = BucketLayout.build([(f"w{i}", torch.Size((rows, ROW))) for i in range(TENSORS)], world)
        start, end = layout.slice_of(rank)
        self.flat = torch.rand(end - start, generator=torch.Generator().manual_seed(rank))
        self.bytes = layout.numel * 4
        key = {f"w{i}": f"model.w{i // 3}" if i % 3 == 0 else f"optim.w{i // 3}.moment{i % 3}" for i in range(TENSORS)}
        self.pieces: dict[str, list[Piece]] = {key[spec.name]: [] for spec in layout.specs}
        for s in layout.segments(start, end):
            spec = layout.specs[s.index]
            data = self.flat[s.at : s.at + s.end - s.start]
            self.pieces[key[spec.name]].append(Piece(spec.name, spec.shape, s.start, data))
        # The others have no flat pieces: each rank saves tensors of its own names and memory, with the same bytes.
        self.own: dict[str, Tensor] = {f"rank{rank}.{k}": p.data.clone() for k, parts in self.pieces.items() for p in parts}


class Turn:
    """One system's saves and loads into folders of its own."""

    def __init__(self, state: State, folder: Path, rank: int, world: int) -> None:
        self.state, self.folder, self.rank, self.world = state, folder, rank, world
        self.background = BackgroundSaver()
        self.where: dict[str, Any] = {"process_group": None, "rank": rank, "world": world}

    def save(self, system: str) -> Callable[[], None] | None:
        """Saves; a background save returns what waits for it."""
        at = self.folder / system.replace(" ", "-")
        if system == "torch.save":
            at.mkdir(parents=True, exist_ok=True)
            with (at / f"{self.rank}.pt").open("wb") as file:
                torch.save(self.state.own, file)
                file.flush()
                os.fsync(file.fileno())
        elif system == "dcp":
            writer = dcp.FileSystemWriter(at / "a", sync_files=True)
            dcp.save(dict(self.state.own), storage_writer=writer)
        elif system == "zeroengine":
            save(at / "a", self.state.pieces, {}, {}, **self.where)
        else:
            later = {"later": lambda key: key.startswith("optim.")}  # as the engine does
            self.background.start(at / "a", self.state.pieces, {}, {}, **later)
            return self.background.wait
        return None

    def load(self, system: str) -> None:
        at = self.folder / system.replace(" ", "-")
        if system == "torch.save":
            for key, value in torch.load(at / f"{self.rank}.pt", weights_only=True).items():
                self.state.own[key].copy_(value)
        elif system == "dcp":
            dcp.load(dict(self.state.own), checkpoint_id=at / "a")
        else:
            load(at / "a", self.state.pieces, **self.where)


def _rank(rank: int, world: int, given: argparse.Namespace, store: str, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    state = State(given.megabytes, rank, world)
    turn = Turn(state, Path(given.work), rank, world)
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "blocked": [], "load": []} for name in SYSTEMS}
    memory = dict.fromkeys(SYSTEMS, 0)
    for round_ in range(given.rounds + 1):
        for k in range(len(SYSTEMS)):
            name = SYSTEMS[(k + round_) % len(SYSTEMS)]
            dist.barrier()
            before = resident_bytes() or 0
            reset_peak()
            began = time.perf_counter()
            wait = turn.save(name)
            blocked = time.perf_counter() - began
            if wait is not None:
                wait()
            dist.barrier()
            saved = time.perf_counter() - began
            grown = (peak_bytes() or before) - before
            began = time.perf_counter()
            turn.load(name)
            dist.barrier()
            loaded = time.perf_counter() - began
            if round_:  # the first one warms up
                memory[name] = max(memory[name], grown)
                for what, value in (("save", saved), ("blocked", blocked), ("load", loaded)):
                    times[name][what].append(value)
    turn.background.close()
    worst = [None] * world
    dist.all_gather_object(worst, (times, memory))
    if rank == 0:
        out.put((state.bytes, worst, _export(Path(given.work))))
    dist.destroy_process_group()


def _export(work: Path) -> dict[str, float]:
    """Seconds and extra memory of an export of what was saved, after one that warms up."""
    took, grown, largest = 0.0, 0, 0
    for round_ in range(2):
        saved = SavedCheckpoint(work / "zeroengine", "a")
        before = resident_bytes() or 0
        reset_peak()
        began = time.perf_counter()
        entries = export_weights(saved, work / f"export{round_}")
        took = time.perf_counter() - began
        grown = (peak_bytes() or before) - before
        largest = max(entry.nbytes for entry in entries)
    return {"export_s": took, "extra_bytes": grown, "largest_tensor_bytes": largest}


def summary(size: int, ranks: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """One row a system: medians over rounds of the slowest rank's times; memory of the rank that grew most."""
    rows = []
    for name in SYSTEMS:
        slowest = {
            what: [max(times) for times in zip(*(r[0][name][what] for r in ranks), strict=True)] for what in ("save", "blocked", "load")
        }
        middle = {what: statistics.median(values) for what, values in slowest.items()}
        rows.append({
            "system": name, "bytes": size, "save_mb_s": size / 1e6 / middle["save"], "load_mb_s": size / 1e6 / middle["load"],
            "blocked_s": middle["blocked"], "save_s": middle["save"], "load_s": middle["load"],
            "extra_bytes": max(r[1][name] for r in ranks), "rounds": slowest,
        })  # fmt: skip
    return rows


def text(rows: Sequence[dict[str, Any]], ranks: int, export: dict[str, float]) -> str:
    blocking = next(row["blocked_s"] for row in rows if row["system"] == "zeroengine")
    share = rows[0]["bytes"] / ranks
    lines = [f"{'system':<22}{'save MB/s':>10}{'load MB/s':>10}{'blocked s':>11}{'of blocking':>12}{'extra memory / share':>22}"]
    for row in rows:
        lines.append(
            f"{row['system']:<22}{row['save_mb_s']:>10.0f}{row['load_mb_s']:>10.0f}{row['blocked_s']:>11.3f}"
            f"{row['blocked_s'] / blocking:>11.1%} {row['extra_bytes'] / share:>21.2f}"
        )
    speed, largest = rows[0]["bytes"] / 1e6 / export["export_s"], export["largest_tensor_bytes"]
    lines.append(
        f"export by one process: {speed:.0f} MB/s, extra memory {export['extra_bytes'] / largest:.2f} of the largest tensor "
        f"({largest / 1e6:.1f} MB)"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=positive, default=400, help="of fp32 state, over all ranks (default: 400)")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=5, help="counted rounds, after one that warms up (default: 5)")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write (the disk that is measured)")
    parser.add_argument("--json", help="writes all times there")
    given = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="zeroengine-checkpoint-") as work:
        given.work = work
        queue = context.Queue()
        processes = [context.Process(target=_rank, args=(r, given.ranks, given, f"{work}/store", queue)) for r in range(given.ranks)]
        for process in processes:
            process.start()
        try:
            size, ranks, export = _result(queue, processes)
        finally:
            for process in processes:
                process.join(30)
                process.kill()
    rows = summary(size, ranks)
    sys.stdout.write(text(rows, given.ranks, export) + "\n")
    if given.json:
        Path(given.json).parent.mkdir(parents=True, exist_ok=True)
        Path(given.json).write_text(json.dumps({"systems": rows, "export": export}, indent=1))
    return 0


def _result(queue: Any, processes: Sequence[Any]) -> Any:
    while True:
        try:
            return queue.get(timeout=1)
        except queues.Empty:
            if any(p.exitcode not in (None, 0) for p in processes):
                for p in processes:
                    p.kill()
                raise SystemExit("a rank failed; its error is above") from None


if __name__ == "__main__":
    sys.exit(main())
