"""A process leaves with its own exit code, also while the store is slow to answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from tests.forks import Forked
from tests.ranks import free_port

RANK = """
    import sys, torch.distributed as dist
    from zeroengine.comm.health import process_monitor
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    process_monitor()
    print("here", flush=True)
    sys.stdin.readline()
    sys.exit(7)
"""


def _store(port: int, here: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    here.send(True)
    signal.pause()
    del store


def started(port: int) -> subprocess.Popen[str]:
    """The rank, in an interpreter of its own, which is taken down in the end."""
    code = "\n".join(line[4:] for line in RANK.splitlines())
    command = [sys.executable, "-c", code, str(port)]
    env = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


@pytest.mark.ranks
@pytest.mark.parametrize("seconds", [1.02, 1.1, 1.2, 1.3])
def test_a_store_that_answers_late_does_not_change_the_exit_code(seconds: float) -> None:
    port = free_port()
    here, there = multiprocessing.Pipe(duplex=False)
    store = Forked(_store, (port, there))
    store.start()
    try:
        assert here.poll(60) and store.pid is not None
        rank = started(port)
        os.kill(store.pid, signal.SIGSTOP)
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        time.sleep(seconds)  # the farewell waits a second for the store: now the interpreter is being taken down
        os.kill(store.pid, signal.SIGCONT)
        assert rank.wait(30) == 7
    finally:
        store.kill()
        store.join()
