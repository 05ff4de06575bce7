"""A process leaves with its own exit code, also while the store is slow to answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.ranks import free_port

STORE = """
    import sys, torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    print("here", flush=True)
    sys.stdin.read()
"""

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


def started(script: str, port: int) -> subprocess.Popen[str]:
    code = "\n".join(line[4:] for line in script.splitlines())
    command = [sys.executable, "-c", code, str(port)]
    env = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


@pytest.mark.ranks
@pytest.mark.parametrize("seconds", [1.02, 1.1, 1.2, 1.3])
def test_a_store_that_answers_late_does_not_change_the_exit_code(seconds: float) -> None:
    port = free_port()
    store = started(STORE, port)
    try:
        rank = started(RANK, port)
        store.send_signal(signal.SIGSTOP)
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        time.sleep(seconds)  # the farewell waits a second for the store: now the interpreter is being taken down
        store.send_signal(signal.SIGCONT)
        assert rank.wait(30) == 7
    finally:
        store.kill()
        store.wait()
