"""Runs a test function on several ranks, each a process of its own, with its own bound in time.

    def _job(rank: int, world: int, arg: int) -> float: ...   # module level: it is pickled by name
    results = run_ranks(_job, 3, 7)                             # [value of rank 0, of rank 1, of rank 2]

A rank that raises makes `run_ranks` raise `RanksFailed` with every rank's traceback. `failures=True` returns the
outcomes instead, for tests of errors: one `Outcome` a rank.

Ranks are forked from a server that has imported torch, this package and transformers and has done nothing else (tests/forks.py).
What is read as a process starts, or while it imports, needs `fresh`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from tests.forks import Forked


class RanksFailed(AssertionError):
    pass


@dataclass
class Outcome:
    value: Any = None
    error: str | None = None  # traceback text
    exitcode: int | None = None
    seconds: float = 0.0  # from the start of all ranks to the end of this one


def free_port() -> int:
    """Below the ports that the system gives to connections, so that none of those takes it before the ranks do."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _main(fn: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...], env: dict[str, str], pipe: Any) -> None:
    own = dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    for name in os.environ.keys() - env.keys():  # the server's, which has started earlier
        del os.environ[name]
    os.environ.update(own | env)
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        pipe.send_bytes(pickle.dumps(("ok", fn(rank, world, *args))))  # plain pickle: no shared memory outlives the rank
    except BaseException:  # the parent reports it
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 120.0,
    failures: bool = False,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    server: str = "engine",
    victim: int | None = None,
) -> list[Any]:
    """`env`: variables of the ranks beside this process'. `fresh`: new processes, for what is read as a process starts. `server`:
    the module of tests/preload whose imports the ranks begin with. `victim`: a rank that stops for ever, and is killed when all others
    have ended."""
    spawn = multiprocessing.get_context("spawn")
    port = free_port()
    procs: list[BaseProcess] = []
    pipes = []
    for rank in range(world):
        here, there = multiprocessing.Pipe(duplex=False)
        whole = (fn, rank, world, port, args, {**os.environ, **(env or {})}, there)
        p = spawn.Process(target=_main, args=whole) if fresh else Forked(_main, whole, server)
        p.start()
        there.close()
        procs.append(p)
        pipes.append(here)
    start = time.monotonic()  # the first rank of all waits until its server has imported everything
    outcomes = [Outcome() for _ in range(world)]
    pending, drained = set(range(world)), set()  # a pipe at its end polls as readable for ever
    while pending and time.monotonic() - start < timeout:
        if pending == {victim}:
            break
        if pending <= drained:
            time.sleep(0.01)
        for r in list(pending):
            if r not in drained and pipes[r].poll(0.01):
                try:
                    kind, value = pickle.loads(pipes[r].recv_bytes())
                    if kind == "ok":
                        outcomes[r].value = value
                    else:
                        outcomes[r].error = value
                except EOFError:
                    drained.add(r)
            if not procs[r].is_alive():
                procs[r].join()
                if r not in drained and pipes[r].poll(0):
                    continue
                outcomes[r].exitcode = procs[r].exitcode
                outcomes[r].seconds = time.monotonic() - start
                pending.discard(r)
    for r in pending:
        procs[r].kill()
        procs[r].join()
        outcomes[r].error = (outcomes[r].error or "") + f"\nrank {r} did not end within {timeout} s"
        outcomes[r].seconds = timeout
    if failures:
        return outcomes
    bad = [r for r, o in enumerate(outcomes) if o.error or o.exitcode]
    if bad:
        raise RanksFailed("\n".join(f"--- rank {r} (exit code {outcomes[r].exitcode})\n{outcomes[r].error or ''}" for r in bad))
    return [o.value for o in outcomes]
