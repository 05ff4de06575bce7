"""Runs `python -m tests.comm.faults <scenario>` on several ranks as real interpreters, to see how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Ended:
    code: int | None  # None: had to be killed by the test
    output: str
    seconds: float  # from the fault (the line "FAULT <time>" of any rank) to the end of this rank


def run_processes(scenario: str, world: int, *arguments: object, timeout: float = 60.0, victims: tuple[int, ...] = ()) -> list[Ended]:
    """`victims` may stay behind (stopped): they are killed when the others have ended."""
    port = free_port()
    procs, files = [], []
    for rank in range(world):
        file = tempfile.TemporaryFile("w+")
        variables = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.comm.faults", scenario, *map(str, arguments)]
        procs.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables, cwd=ROOT))
        files.append(file)
    start, ends = time.time(), [0.0] * world
    killed: set[int] = set()
    while any(p.poll() is None for p in procs):
        for rank, p in enumerate(procs):
            if p.poll() is not None and not ends[rank]:
                ends[rank] = time.time()
        late = time.time() - start > timeout
        rest = [r for r, p in enumerate(procs) if p.poll() is None]
        if late or (rest and set(rest) <= set(victims) and len(rest) < world):
            for rank in rest:
                procs[rank].send_signal(signal.SIGKILL)
                killed.add(rank)
                procs[rank].wait()
        time.sleep(0.02)
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read())
    faults = [float(line.split()[1]) for text in outputs for line in text.splitlines() if line.startswith("FAULT ")]
    zero = min(faults, default=start)
    return [Ended(None if r in killed else procs[r].returncode, outputs[r], (ends[r] or time.time()) - zero) for r in range(world)]
