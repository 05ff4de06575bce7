"""A process leaves with its own exit code, also while the store is slow to answer."""

from __future__ import annotations

import hashlib
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


# What was registered before the package was imported runs after what the package does at the end.
NATIVE = """
    import atexit, hashlib, sys, threading, time
    long = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", int(sys.argv[1])), daemon=True)
    atexit.register(lambda: print(long.is_alive(), time.monotonic() - begun))
    import zeroengine.comm
    long.start()
    begun = time.monotonic()
    sys.exit(7)
"""


def left(iterations: int) -> tuple[str, float]:
    """Whether native code still ran when the interpreter went, and how long it waited."""
    code = "\n".join(line[4:] for line in NATIVE.splitlines())
    ended = subprocess.run([sys.executable, "-c", code, str(iterations)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 7, ended.stderr
    alive, seconds = ended.stdout.split()
    return alive, float(seconds)


def test_a_thread_in_native_code_comes_back_before_the_interpreter_goes() -> None:
    begun = time.process_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
    second = 200_000 / (time.process_time() - begun)
    assert left(int(second * 0.1))[0] == "False"
    alive, seconds = left(int(second * 8))
    assert alive == "True" and seconds < 4.0  # one that goes on for long is not waited for
