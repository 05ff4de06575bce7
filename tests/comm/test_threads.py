"""Several threads of a rank, each with streams of its own: one that is late holds up its own streams alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed


def _crosswise(rank: int, world: int, known: bool) -> dict[str, float]:
    """On rank 0 the thread of y is late, on rank 1 that of x: each rank waits for the other, and nothing is wrong. `known`: each
    thread has used its stream before."""
    init_distributed(verbose=False)
    fabric = Fabric(timeout=2)
    comms = {name: fabric.communicator(name) for name in "xy"}
    found: dict[str, float] = {}

    def work(name: str) -> None:
        value = torch.ones(10)
        if known:
            comms[name].barrier("by its own thread")
        time.sleep(4.5 * (name == "yx"[rank]))
        comms[name].all_reduce(value, name).wait()
        found[name] = float(value[0])

    threads = [threading.Thread(target=work, args=name) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fabric.close()
    return found


def test_threads_that_are_late_crosswise_are_no_divergence() -> None:
    for known in (False, True):
        assert run_ranks(_crosswise, 2, known, timeout=60) == [{"x": 2.0, "y": 2.0}] * 2


def _diverges(rank: int, world: int, how: str) -> str:
    """One thread does everything, in another order on each rank; the main thread waits for it."""
    init_distributed(verbose=False)
    fabric = Fabric(timeout=4)
    said: list[str] = []

    def work() -> None:
        try:
            comms = {name: fabric.communicator(name) for name in ("yx" if how == "made" and rank else "xy")}
            if how == "used":
                for comm in comms.values():
                    comm.barrier("start")
            for name in ("xy", "yx")[rank]:
                comms[name].all_reduce(torch.ones(10), name).wait()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return said[0]


@pytest.mark.parametrize("how", ["made", "new", "used"])
def test_a_divergence_of_another_thread_than_the_main_one_is_found(how: str) -> None:
    for rank, said in enumerate(run_ranks(_diverges, 2, how, timeout=60)):
        assert said.startswith("DivergenceError"), said
        assert f"rank {1 - rank}" in said and (how == "made" or "test_threads.py" in said), said
