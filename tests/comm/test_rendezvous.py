"""Starting torch.distributed: a lone process, missing variables, ports in use, two jobs on one port."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.comm.processes import ROOT
from tests.ranks import Outcome, free_port, run_ranks
from zeroengine.comm.rendezvous import place_from_environment
from zeroengine.errors import ConfigError

ALONE = """
import torch, torch.distributed as dist
import zeroengine.comm as comm
comm.init_distributed()
comm.init_distributed("gloo")
assert comm.is_initialized() and dist.is_initialized() and (comm.get_rank(), comm.get_world_size()) == (0, 1)
t = torch.ones(3)
comm.all_reduce(t)
comm.barrier()
fabric = comm.Fabric()
c = fabric.communicator("params")
c.all_gather(t, t, "w").wait()
fabric.close()
comm.destroy_process_group()
print("FINE")
"""


def run_alone(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    clean |= {"PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60, check=False)


def test_a_lone_process_needs_no_variables() -> None:
    done = run_alone(ALONE)
    assert done.returncode == 0 and "FINE" in done.stdout, done.stderr


def test_a_world_of_one_with_a_launchers_variables() -> None:
    done = run_alone(ALONE, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert done.returncode == 0 and "FINE" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "rank 1 of 2: MASTER_PORT not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 is outside 0\.\.1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not an integer"),
    ],
)
def test_wrong_variables(env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place_from_environment(env, -1, -1, mpi=False)


def test_an_mpi_launchers_variables() -> None:
    env = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": "5",
    }
    place = place_from_environment(env, -1, -1, mpi=True)
    assert place is not None and (place.rank, place.world_size, place.host, place.port) == (1, 2, "127.0.0.1", 5)
    assert place_from_environment(env, -1, -1, mpi=False) is None
    del env["OMPI_COMM_WORLD_LOCAL_SIZE"]
    with pytest.raises(ConfigError, match="MASTER_ADDR not set"):
        place_from_environment(env, -1, -1, mpi=True)


def _join(rank: int, world: int, port: int) -> None:
    from zeroengine.comm import init_distributed

    os.environ["MASTER_PORT"] = str(port)
    init_distributed(verbose=False, timeout=60)


def _silent(server: socket.socket) -> None:
    kept = []
    while True:
        try:
            kept.append(server.accept())
        except OSError:
            return


def _rude(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        connection.close()


@pytest.mark.parametrize("serve", [_silent, _rude])
def test_port_in_use(serve: Callable[[socket.socket], None]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        ended: list[Outcome] = run_ranks(_join, 2, port, timeout=50, failures=True)
    for rank, outcome in enumerate(ended):
        assert outcome.error is not None and "RankError" in outcome.error, outcome.error
        assert f"port {port} of 127.0.0.1" in outcome.error and "MASTER_PORT" in outcome.error
        assert f"rank {rank}" in outcome.error
        assert outcome.seconds < 30, outcome.seconds  # start of Python and torch included


def _job(rank: int, world: int, port: int, here: int, size: int) -> str:
    from zeroengine.comm import init_distributed

    os.environ.update(MASTER_PORT=str(port), RANK=str(here), WORLD_SIZE=str(size))
    if here:
        time.sleep(1.0)
    init_distributed(verbose=False, timeout=10)
    if not here:
        time.sleep(5.0)  # it keeps the store: late comers must still find it
    return "joined"


def _two_jobs(rank: int, world: int, port: int) -> str:
    """Rank 0 keeps the store of a job of two; the other claims to be rank 1 of a job of three on the same port."""
    return _job(rank, world, port, rank, (2, 3)[rank])


def test_two_jobs_on_one_port() -> None:
    ended = run_ranks(_two_jobs, 2, free_port(), timeout=40, failures=True)
    assert "WORLD_SIZE is 3 here and 2 on rank 0" in (ended[1].error or ""), ended[1].error


def _behind_a_slow_host(rank: int, world: int, slow: int, direct: int) -> str:
    os.environ["MASTER_PORT"] = str(slow if rank else direct)
    from zeroengine.comm import barrier, init_distributed

    init_distributed(verbose=False, timeout=40)
    barrier()
    return "joined"


def _relay(server: socket.socket, store: Callable[[], socket.socket], wait: float) -> None:
    """Passes on what it is sent, to each connection `wait` seconds late for the first time."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(connection: socket.socket) -> None:
        time.sleep(wait)
        with contextlib.suppress(OSError):
            there = store()
            threading.Thread(target=pump, args=(there, connection), daemon=True).start()
            pump(connection, there)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()


def test_a_store_that_answers_late_is_waited_for() -> None:
    store_port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        arguments = (server, lambda: socket.create_connection(("127.0.0.1", store_port), timeout=20), 6.0)
        threading.Thread(target=_relay, args=arguments, daemon=True).start()
        slow = server.getsockname()[1]
        assert run_ranks(_behind_a_slow_host, 2, slow, store_port, timeout=60) == ["joined", "joined"]


def _same_rank(rank: int, world: int, port: int) -> str:
    return _job(rank, world, port, min(rank, 1), 2)


def test_one_rank_twice() -> None:
    ended = run_ranks(_same_rank, 3, free_port(), timeout=40, failures=True)
    texts = [o.error or "" for o in ended[1:]]
    assert sum("another process has already joined as rank 1" in t for t in texts) == 1, texts
