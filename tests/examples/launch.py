"""Starts an example on several ranks, the way a launcher does: one process a rank, each with its own output.

Ranks are forks of a server that has imported what examples import (tests/forks.py), and run the file as a program. With
`fresh` each is a new interpreter, as for a user: every example has a test that asks for it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forks import Program, start_program, written_to
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    out: str
    err: str


def start_example(name: str, *args: object, ranks: int = 2, timeout: float = 120.0, fresh: bool = False) -> list[Ended]:
    """Runs `examples/<name>` on `ranks` ranks and returns how each ended; kills all of them after `timeout` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        return _outcomes(_start(name, args, ranks, Path(folder), fresh), Path(folder), time.monotonic() + timeout)


def kill_example(name: str, *args: object, when: Callable[[], bool], ranks: int = 2, timeout: float = 120.0) -> None:
    """Runs `examples/<name>` and kills every rank (SIGKILL) as soon as `when()` is true."""
    with tempfile.TemporaryDirectory() as folder:
        started = _start(name, args, ranks, Path(folder), fresh=False)
        deadline = time.monotonic() + timeout
        while not when() and time.monotonic() < deadline and all(rank.running() for rank in started):
            time.sleep(0.005)
        for rank in started:
            rank.kill()
        ended = _outcomes(started, Path(folder), deadline)
    if not when() or any(e.code >= 0 for e in ended):
        raise AssertionError("it ended before it could be killed\n" + "\n".join(f"{e.code}\n{e.out}\n{e.err}" for e in ended))


def _start(name: str, args: Sequence[object], ranks: int, folder: Path, fresh: bool) -> list[Program]:
    port = free_port()
    program = [str(EXAMPLES / name), *map(str, args)]
    started = []
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
        with written_to(folder / f"out{rank}", folder / f"err{rank}") as streams:
            started.append(start_program(program, environment, streams, fresh))
    return started


def _outcomes(started: Sequence[Program], folder: Path, deadline: float) -> list[Ended]:
    for program in started:
        program.wait(max(1.0, deadline - time.monotonic()))
    return [
        Ended(program.code(), *((folder / f"{stream}{rank}").read_text() for stream in ("out", "err")))
        for rank, program in enumerate(started)
    ]


def run_example(name: str, *args: object, ranks: int = 2, timeout: float = 120.0, fresh: bool = False) -> str:
    """What rank 0 wrote to stdout, once every rank has ended well."""
    ended = start_example(name, *args, ranks=ranks, timeout=timeout, fresh=fresh)
    failures = [f"--- rank {rank} ended with {e.code}\n{e.out}\n{e.err}" for rank, e in enumerate(ended) if e.code != 0]
    if failures:
        raise AssertionError("\n".join(failures))
    return ended[0].out
