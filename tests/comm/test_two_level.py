"""Ranks of one machine that are told to be on several hosts: shared memory inside a host, Gloo between."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.comm.test_operations import _operations, make
from tests.ranks import Outcome, run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.comm.two_level import TwoLevelTransport
from zeroengine.ops.build import library

pytestmark = pytest.mark.skipif(library("shm").dll is None, reason="no native library; test_build.py fails where it should be")


def _on_host(rank: int, per_host: int) -> None:
    os.environ["ZE_HOST"] = f"host {rank // per_host}"


def _every_operation(rank: int, world: int, per_host: int) -> None:
    _on_host(rank, per_host)
    _operations(rank, world, TwoLevelTransport.kind)


@pytest.mark.parametrize(("world", "per_host"), [(4, 2), (6, 2)])
def test_every_operation_has_the_bits_of_one_level(world: int, per_host: int) -> None:
    run_ranks(_every_operation, world, per_host, timeout=240)


def _bytes_between(rank: int, world: int) -> list[int]:
    _on_host(rank, 2)
    init_distributed(verbose=False)
    comm = Fabric(timeout=20).communicator("test")
    numel, sent = 1 << 16, [comm.sent_between_hosts]

    def note() -> None:
        sent.append(comm.sent_between_hosts)

    shard, full = make(rank, numel, torch.float32), comm.empty(world * numel, torch.empty(0))
    comm.all_gather(full, shard, "gather").wait()
    note()
    comm.reduce_scatter(shard, full, "reduce").wait()
    note()
    comm.all_reduce(full, "all-reduce").wait()
    note()
    comm.broadcast(full, 1, "broadcast").wait()
    note()
    out = torch.empty_like(full)
    comm.all_to_all(out, full, "exchange").wait()
    note()
    return [b - a for a, b in zip(sent, sent[1:], strict=False)]


def test_what_leaves_a_host() -> None:
    """For S bytes a rank on 2 hosts of 2: a gather sends S from each rank and not 2 S, a reduction likewise."""
    share = 4 * (1 << 16)
    for rank, sent in enumerate(run_ranks(_bytes_between, 4, timeout=60)):
        assert sent == [share, share, 2 * share, 4 * share if rank == 1 else 0, 2 * share]


def _with_odd_hosts(rank: int, world: int, places: list[int]) -> str:
    os.environ["ZE_HOST"] = str(places[rank])
    init_distributed(verbose=False)
    comm = Fabric(timeout=20).communicator("test")
    data = make(rank, 40_000, torch.float32)
    comm.all_reduce(data, "sum").wait()
    assert torch.isfinite(data).all()
    return comm.moves_over


@pytest.mark.parametrize("places", [[0, 0, 1], [0, 1, 0, 1], [0, 1]])
def test_uneven_hosts_keep_to_one_level(places: list[int]) -> None:
    assert set(run_ranks(_with_odd_hosts, len(places), places, timeout=60)) == {"Gloo"}


def _diverge(rank: int, world: int) -> None:
    _on_host(rank, 2)
    init_distributed(verbose=False)
    comm = Fabric(timeout=10).communicator("test")
    data = torch.zeros(50_000)
    comm.all_reduce(data, "first").wait()
    comm.all_reduce(data, "mine" if rank == 3 else "ours").wait()


def test_another_operation_is_told_on_every_rank() -> None:
    for outcome in run_ranks(_diverge, 4, timeout=60, failures=True):
        assert "DivergenceError" in outcome.error and "mine" in outcome.error and "ours" in outcome.error


def _die(rank: int, world: int) -> None:
    _on_host(rank, 2)
    init_distributed(verbose=False)
    comm = Fabric(timeout=8).communicator("test")
    data = torch.zeros(50_000)
    comm.all_reduce(data, "first").wait()
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        comm.all_reduce(data, "next").wait()


def test_a_killed_rank_is_named_on_both_hosts() -> None:
    outcomes: list[Outcome] = run_ranks(_die, 4, timeout=60, failures=True)
    for rank in (0, 1, 3):
        assert "rank 2" in outcomes[rank].error and "RankError" in outcomes[rank].error
        assert outcomes[rank].seconds < 40
