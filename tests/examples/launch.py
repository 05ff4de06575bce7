"""Starts an example on several ranks, the way a launcher does: one process a rank, each with its own output."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    out: str
    err: str


def start_example(name: str, *args: object, ranks: int = 2, timeout: float = 120.0) -> list[Ended]:
    """Runs `examples/<name>` on `ranks` ranks and returns how each ended; kills all of them after `timeout` seconds."""
    return _outcomes(_start(name, args, ranks), time.monotonic() + timeout)


def kill_example(name: str, *args: object, when: Callable[[], bool], ranks: int = 2, timeout: float = 120.0) -> None:
    """Runs `examples/<name>` and kills every rank (SIGKILL) as soon as `when()` is true."""
    processes = _start(name, args, ranks)
    deadline = time.monotonic() + timeout
    while not when() and time.monotonic() < deadline and all(p.poll() is None for p in processes):
        time.sleep(0.005)
    for process in processes:
        process.kill()
    ended = _outcomes(processes, deadline)
    if not when() or any(e.code >= 0 for e in ended):
        raise AssertionError("it ended before it could be killed\n" + "\n".join(f"{e.code}\n{e.out}\n{e.err}" for e in ended))


def _start(name: str, args: Sequence[object], ranks: int) -> list[subprocess.Popen[str]]:
    port = free_port()
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
        }
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    return processes


def _outcomes(processes: Sequence[subprocess.Popen[str]], deadline: float) -> list[Ended]:
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ended.append(Ended(process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ended


def run_example(name: str, *args: object, ranks: int = 2, timeout: float = 120.0) -> str:
    """What rank 0 wrote to stdout, once every rank has ended well."""
    ended = start_example(name, *args, ranks=ranks, timeout=timeout)
    failures = [f"--- rank {rank} ended with {e.code}\n{e.out}\n{e.err}" for rank, e in enumerate(ended) if e.code != 0]
    if failures:
        raise AssertionError("\n".join(failures))
    return ended[0].out
