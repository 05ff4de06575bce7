"""Runs `python -m tests.comm.faults <scenario>` on several ranks, to see how they end."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.forks import Program, start_program, written_to
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Ended:
    code: int | None  # None: had to be killed by the test
    output: str
    seconds: float  # from the fault (the line "FAULT <time>" of any rank) to the end of this rank


def run_processes(
    scenario: str, world: int, *arguments: object, timeout: float = 60.0, victims: tuple[int, ...] = (), fresh: bool = False
) -> list[Ended]:
    """`victims` may stay behind (stopped): they are killed when the others have ended. `fresh`: interpreters of their own, for tests in
    which one is taken down."""
    with tempfile.TemporaryDirectory() as folder:
        return _watch(_start(scenario, world, arguments, Path(folder), fresh), Path(folder), timeout, victims)


def _start(scenario: str, world: int, arguments: tuple[object, ...], folder: Path, fresh: bool) -> list[Program]:
    port, started = free_port(), []
    for rank in range(world):
        variables = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        with written_to(folder / str(rank), folder / str(rank)) as streams:
            started.append(start_program(["-m", "tests.comm.faults", scenario, *map(str, arguments)], variables, streams, fresh))
    return started


def _watch(programs: list[Program], folder: Path, timeout: float, victims: tuple[int, ...]) -> list[Ended]:
    world = len(programs)
    start, ends = time.time(), [0.0] * world
    killed: set[int] = set()
    while any(p.running() for p in programs):
        for rank, p in enumerate(programs):
            if not p.running() and not ends[rank]:
                ends[rank] = time.time()
        late = time.time() - start > timeout
        rest = [r for r, p in enumerate(programs) if p.running()]
        if late or (rest and set(rest) <= set(victims) and len(rest) < world):
            for rank in rest:
                programs[rank].kill()
                killed.add(rank)
        time.sleep(0.02)
    outputs = [(folder / str(rank)).read_text() for rank in range(world)]
    faults = [float(line.split()[1]) for text in outputs for line in text.splitlines() if line.startswith("FAULT ")]
    zero = min(faults, default=start)
    return [Ended(None if r in killed else p.code(), outputs[r], (ends[r] or time.time()) - zero) for r, p in enumerate(programs)]
