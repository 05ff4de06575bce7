"""The backend "zeroengine" for CPU tensors in one group with NCCL for those of CUDA. One device is enough for one rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zeroengine.comm import init_distributed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _mixed(rank: int, world: int) -> list[float]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    init_distributed("cpu:zeroengine,cuda:nccl", verbose=False)
    found = []
    for group in (dist.group.WORLD, dist.new_group()):
        for where in (device, torch.device("cpu")):
            t = torch.full((1000,), rank + 1.0, device=where)
            dist.all_reduce(t, group=group)
            full = torch.empty(1000 * world, device=where)
            dist.all_gather_into_tensor(full, t, group=group)
            found.append(float(full[-1]))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(device), device_ids=[device.index])
    model(torch.ones(2, 4, device=device)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_both_devices_in_one_group() -> None:
    world = min(2, torch.cuda.device_count())
    want = sum(range(1, world + 1))
    assert run_ranks(_mixed, world, timeout=120, fresh=True) == [[float(want)] * 4] * world
