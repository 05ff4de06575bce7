"""Communicators over NCCL. Two processes; needs two CUDA devices."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.comm.direct import DirectCommunicator
from zeroengine.errors import DivergenceError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _fabric() -> tuple[Fabric, torch.device]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    init_distributed(verbose=False)
    return Fabric(device, timeout=20), device


def _operations(rank: int, world: int) -> None:
    fabric, device = _fabric()
    comm = fabric.communicator("params")
    assert isinstance(comm, DirectCommunicator)
    full = torch.empty(7 * world, device=device)
    comm.all_gather(full, torch.full((7,), float(rank), device=device), "w").wait()
    assert full.tolist() == [float(r) for r in range(world) for _ in range(7)]
    shard = torch.ones(7, device=device)
    comm.reduce_scatter(shard, torch.ones(7 * world, device=device).bfloat16(), "g", scale=0.5, accumulate=True).wait()
    assert shard.tolist() == [1.0 + 0.5 * world] * 7
    own = full[rank * 7 : (rank + 1) * 7]
    full.fill_(rank + 1.0)
    comm.reduce_scatter(own, full, "g in place", scale=2.0).wait()
    assert own.tolist() == [2.0 * sum(range(1, world + 1))] * 7
    total = torch.tensor([rank + 1.0], device=device)
    comm.all_reduce(total, "n", op="max").wait()
    assert total.item() == world
    comm.broadcast(total, 0, "b").wait()
    comm.all_to_all(full, full.clone(), "a").wait()
    (comm.send(total, 1, "s") if rank == 0 else comm.recv(total, 0, "s")).wait()
    comm.verify_order(fabric.communicator("control", control=True))
    fabric.close()


def test_operations() -> None:
    run_ranks(_operations, 2, timeout=120)


def _order(rank: int, world: int) -> str:
    fabric, device = _fabric()
    comm, control = fabric.communicator("params"), fabric.communicator("control", control=True)
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        comm.all_gather(torch.empty(2 * world, device=device), torch.ones(2, device=device), f"{name}.weight").wait()
    try:
        comm.verify_order(control)
    except DivergenceError as error:
        return str(error)
    return "no error"


def test_order_differs() -> None:
    for text in run_ranks(_order, 2, timeout=120):
        assert "a.weight" in text and "b.weight" in text
