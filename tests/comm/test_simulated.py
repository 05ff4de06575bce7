"""A thousand ranks on torch's fake process group: everything works, and the host's work does not grow with them.

Calls into torch are counted, not timed.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from zeroengine.comm import Fabric
from zeroengine.mesh import build_mesh


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _simulated(rank: int, world: int, simulated: int, dp_replicate: int) -> dict[str, int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=simulated)
    mesh = build_mesh(Fabric(), dp_replicate=dp_replicate)
    comm = mesh.shard_grads
    n = comm.size
    assert n == simulated // dp_replicate and mesh.control.size == simulated
    calls = {}
    full, shard = torch.ones(n * 4), torch.ones(4)
    for name, run in {
        "all_gather": lambda: comm.all_gather(full, shard, "w").wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(shard, full, "g", scale=0.5).wait(),
        "narrow": lambda: comm.reduce_scatter(shard, full.bfloat16(), "g", accumulate=True).wait(),
        "all_reduce": lambda: mesh.replicate_grads.all_reduce(torch.ones(50_000), "g").wait(),
        "broadcast": lambda: comm.broadcast(full, 0, "b").wait(),
        "all_to_all": lambda: comm.all_to_all(full, full.clone(), "a").wait(),
        "exchange": lambda: mesh.control.exchange(torch.ones(3), "e"),
        "barrier": lambda: mesh.control.barrier("b"),
        "send": lambda: comm.send(shard, n - 1, "s").wait(),
        "recv": lambda: comm.recv(shard, n - 1, "s").wait(),
    }.items():
        with CountCalls() as count:
            run()
        calls[name] = count.calls
    assert comm.traffic.bytes["all_gather"] == 16 * (n - 1)
    mesh.close()
    return calls


@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_a_thousand_ranks(dp_replicate: int) -> None:
    few = run_ranks(_simulated, 1, 4 * dp_replicate, dp_replicate, timeout=60)[0]
    many = run_ranks(_simulated, 1, 1024, dp_replicate, timeout=60)[0]
    levels = 8  # log2(1024 / 4)
    for name, calls in many.items():
        assert calls <= few[name] + 3 * levels, (name, calls, few[name])
    assert many["all_gather"] == few["all_gather"] and many["all_to_all"] == few["all_to_all"]
