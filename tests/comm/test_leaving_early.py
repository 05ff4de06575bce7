"""Ends that come early: a rank that dies while the others make a communicator, messages that nobody matches, a store whose keeper is
gone, a process that joins again, a forked child."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed, rendezvous
from zeroengine.comm.health import start_monitor
from zeroengine.comm.shared import SharedTransport
from zeroengine.errors import RankError
from zeroengine.ops.build import library

needs_shared_memory = pytest.mark.skipif(library("shm").dll is None, reason="no native library")


def _fabric() -> Fabric:
    init_distributed(verbose=False)
    return Fabric(timeout=5)


def _dies_in_the_making(rank: int, world: int) -> str:
    fabric = _fabric()
    fabric.communicator("first").barrier("start")
    if rank == 1:
        SharedTransport.announce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with pytest.raises(RankError) as error:
        fabric.communicator("late")
    fabric.close()
    time.sleep(0.5)  # its thread, if it went on in memory that is gone
    return str(error.value)


@needs_shared_memory
def test_a_fabric_closes_after_a_rank_died_in_the_making_of_a_communicator() -> None:
    outcomes = run_ranks(_dies_in_the_making, 3, timeout=60, failures=True)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert all(outcomes[rank].value is not None and "rank 1" in outcomes[rank].value for rank in (0, 2)), outcomes


def _dies_at_once(rank: int, world: int, victim: int) -> str:
    init_distributed(verbose=False)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError) as error:
        Fabric().communicator("first")
    raise error.value  # an uncaught one ends the process


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_before_its_first_heartbeat_is_named_within_ten_seconds(victim: int) -> None:
    outcomes = run_ranks(_dies_at_once, 3, victim, timeout=60, failures=True)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert f"RankError: rank {rank}" in outcomes[rank].error and f"rank {victim}" in outcomes[rank].error
        assert outcomes[rank].seconds < 10


def _unmatched(rank: int, world: int) -> tuple[float, list[str]]:
    fabric = _fabric()
    comm = fabric.communicator("ring")
    comm.barrier("start")
    works = [comm.send(torch.ones(10), 1, "lonely"), comm.recv(torch.ones(10), 1, "lonely, too")] if rank == 0 else []
    began = time.monotonic()
    fabric.close()
    errors = []
    for work in works:
        with pytest.raises(RuntimeError) as error:
            work.wait()
        errors.append(str(error.value))
    return time.monotonic() - began, errors


@needs_shared_memory
def test_messages_that_nobody_matches_hold_a_close_up_once() -> None:
    (seconds, errors), _ = run_ranks(_unmatched, 2, timeout=60)
    assert seconds < 9 and len(errors) == 2 and all("closed" in text for text in errors)


def _again(rank: int, world: int, late: int) -> list[float]:
    found = []
    for _ in range(3):
        init_distributed(verbose=False)
        value = torch.ones(3)
        dist.all_reduce(value)
        dist.barrier()
        time.sleep(0.4 * (rank == late))
        dist.destroy_process_group()
        found.append(float(value[0]))
    return found


@pytest.mark.parametrize("late", [0, 1], ids=["rank 0 is late to leave", "rank 1 is late to leave"])
def test_a_process_may_leave_and_join_again(late: int) -> None:
    assert run_ranks(_again, 3, late, timeout=60) == [[3.0] * 3] * 3


def _fewer(rank: int, world: int) -> list[float]:
    found = []
    for size in (3, 2, 1):
        os.environ["WORLD_SIZE"] = str(size)
        if rank < size:
            init_distributed(verbose=False)
            value = torch.ones(3)
            dist.all_reduce(value)
            dist.barrier()
            time.sleep(0.4 * (rank == 0))
            dist.destroy_process_group()
            found.append(float(value[0]))
    return found


def test_fewer_ranks_may_meet_again() -> None:
    assert run_ranks(_fewer, 3, timeout=60) == [[3.0, 2.0, 1.0], [3.0, 2.0], [3.0]]


def _health_threads() -> int:
    return sum(thread.name == "zeroengine health" for thread in threading.enumerate())


def _leaves(rank: int, world: int, backend: str) -> tuple[str, int]:
    init_distributed(backend, verbose=False)
    fabric = Fabric(timeout=5)
    comm = fabric.communicator("ring")
    comm.barrier("start")
    said = ""
    if rank == 0:
        with pytest.raises(RankError) as error:
            comm.all_reduce(torch.ones(3), "of both").wait()
        said = str(error.value)
    dist.destroy_process_group()
    deadline = time.monotonic() + 5
    while _health_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(3.0 * (rank == 1))  # the process lives on
    return said, _health_threads()


@pytest.mark.parametrize("backend", ["gloo", "zeroengine"])
def test_who_waits_for_a_rank_that_left_the_group_is_told(backend: str) -> None:
    (said, threads), (_, others) = run_ranks(_leaves, 2, backend, timeout=60)
    assert "rank 1" in said and "has exited" in said
    assert threads == others == 0  # nobody looks after a group that is no more


def test_another_process_may_not_join_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    store, place = dist.HashStore(), rendezvous.Place(0, 2, "localhost", 1, False, "0")
    for _ in range(2):  # a launcher keeps the store while a process leaves and joins again
        rendezvous._claim(store, place, "arrived/0")
    monkeypatch.setattr(rendezvous, "_PROCESS", "another")
    with pytest.raises(RankError, match="another process has already joined as rank 0"):
        rendezvous._claim(store, place, "arrived/0")


def test_a_store_whose_keeper_is_gone_is_an_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, 1, False, timeout=timedelta(seconds=20), wait_for_workers=False)
    del server
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1: the store of the job does not answer any more"):
        start_monitor(object(), client, 1, 2, 1.0)
    assert time.monotonic() - began < 5


def _in_a_child(rank: int, world: int) -> int:
    fabric = _fabric()
    comm = fabric.communicator("ring")
    comm.barrier("start")
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(torch.ones(3), "of a child")
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    comm.barrier("end")
    fabric.close()
    return code


def test_a_forked_child_is_told_to_make_its_own() -> None:
    assert run_ranks(_in_a_child, 2, timeout=60) == [7, 7]
