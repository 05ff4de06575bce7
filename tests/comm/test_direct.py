"""The communicator that hands operations straight to the backend, run here over Gloo: same results, order verified.

What needs a GPU (streams, NCCL) is in tests/gpu.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.comm.direct import DirectCommunicator
from zeroengine.comm.fingerprint import Fingerprint
from zeroengine.errors import DivergenceError


def _pair() -> tuple[DirectCommunicator, object]:
    init_distributed(verbose=False)
    control = Fabric(timeout=20).communicator("control", control=True)
    ranks = list(range(dist.get_world_size()))
    return DirectCommunicator("params", dist.new_group(ranks), ranks), control


def _results(rank: int, world: int) -> None:
    comm, control = _pair()
    full, shard = torch.empty(6 * world), torch.full((6,), float(rank))
    work = comm.all_gather(full, shard, "w")
    work.wait()
    work.wait()
    assert work.done() and full.tolist() == [float(r) for r in range(world) for _ in range(6)]
    comm.reduce_scatter(shard, torch.ones(6 * world).bfloat16(), "g", scale=0.5, accumulate=True).wait()
    assert shard.tolist() == [rank + 0.5 * world] * 6
    comm.reduce_scatter(shard, torch.ones(6 * world), "g", scale=0.25).wait()
    assert shard.tolist() == [0.25 * world] * 6
    comm.all_reduce(shard, "n", scale=2.0).wait()
    assert shard.tolist() == [0.5 * world * world] * 6
    comm.broadcast(shard, 1, "b").wait()
    comm.all_to_all(full, full.clone(), "a").wait()
    if rank < 2:
        (comm.send(shard, 1, "s") if rank == 0 else comm.recv(shard, 0, "s")).wait()
    comm.verify_order(control)
    rows = comm.exchange(torch.tensor([[rank, 1]]), "facts")
    assert rows.tolist() == [[r, 1] for r in range(world)]
    assert comm.exchange(torch.tensor(rank), "one").tolist() == [[r] for r in range(world)]
    assert comm.traffic.bytes["all_gather"] == 24 * (world - 1)
    comm.close()


def test_results() -> None:
    run_ranks(_results, 3, timeout=60)


def _orders(rank: int, world: int, names: tuple[str, ...]) -> str:
    comm, control = _pair()
    for i in range(100):  # more than are remembered
        comm.all_gather(torch.empty(2 * world), torch.ones(2), f"layers.{i}").wait()
    comm.verify_order(control)
    for name in names[rank].split():
        comm.all_gather(torch.empty(2 * world), torch.ones(2), name).wait()
    try:
        comm.verify_order(control)
    except DivergenceError as error:
        return str(error)
    return "no error"


def test_another_order_is_found_after_the_fact() -> None:
    for text in run_ranks(_orders, 2, ("a b", "b a"), timeout=60):
        assert "rank 0: operation 100: all_gather 'a'" in text and "rank 1: operation 100: all_gather 'b'" in text


def test_a_missing_operation_is_found_and_named() -> None:
    """Without running it: a rank that issued one operation less. (Running it would wait for ever, as on a GPU.)"""
    for text in run_ranks(_one_less, 2, timeout=60):
        assert "rank 0: operation 0: all_gather 'w'" in text and "rank 1: nothing more" in text


def _one_less(rank: int, world: int) -> str:
    comm, control = _pair()
    if rank == 0:
        comm.order.add(Fingerprint("all_gather", "w", 4, torch.float32))
    try:
        comm.verify_order(control)
    except DivergenceError as error:
        return str(error)
    return "no error"
