"""Bits do not depend on where buckets are cut, on the mesh or on the kind of reduction; bytes are counted."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.mesh import Mesh, build_mesh


def gradients(rank: int, numel: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=g) * 10.0 ** torch.randint(-5, 6, (numel,), generator=g)


def whole(mesh: Mesh, grads: torch.Tensor) -> torch.Tensor:
    """Reduce over the shard group, then over the replicas, then gather: the whole reduced tensor."""
    n, me = mesh.shard_grads.size, mesh.shard_grads.rank
    full = torch.zeros(-(-grads.numel() // n) * n)
    full[: grads.numel()] = grads
    shard = torch.empty(full.numel() // n)
    mesh.shard_grads.reduce_scatter(shard, full, "g").wait()
    mesh.replicate_grads.all_reduce(shard, "g").wait()
    mesh.shard_params.all_gather(full, shard, "g").wait()
    assert me == mesh.shard_params.rank
    return full[: grads.numel()].clone()


def _bits(rank: int, world: int) -> None:
    init_distributed(verbose=False)
    numel = 40_003
    grads = gradients(rank, numel)
    flat = build_mesh(Fabric(timeout=20))
    want = whole(flat, grads)
    # the order matters for these values, or the test shows nothing
    serial = torch.stack([gradients(r, numel) for r in range(world)]).sum(0)
    assert world < 4 or not torch.equal(serial, want)
    for cuts in ([0, 1, numel], [0, 7, 19_999, 30_001, numel]):
        parts = [whole(flat, grads[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat(parts), want), cuts
    reduced = grads.clone()
    flat.control.all_reduce(reduced, "g").wait()
    assert torch.equal(reduced, want)
    small = torch.cat([_small_all_reduce(flat, piece) for piece in grads.split(1000)])
    assert torch.equal(small, want)
    if world == 4:
        hybrid = build_mesh(Fabric(timeout=20), dp_replicate=2)
        assert (hybrid.shard_grads.size, hybrid.replicate_grads.size, hybrid.control.size) == (2, 2, 4)
        assert torch.equal(whole(hybrid, grads), want)
        hybrid.close()
    flat.close()
    dist.destroy_process_group()


def _small_all_reduce(mesh: Mesh, piece: torch.Tensor) -> torch.Tensor:
    piece = piece.clone()
    mesh.control.all_reduce(piece, "g").wait()
    return piece


def test_bits_on_3_ranks() -> None:
    run_ranks(_bits, 3, timeout=60)


def test_bits_on_4_ranks() -> None:
    run_ranks(_bits, 4, timeout=60)


def _traffic(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
    init_distributed(verbose=False)
    comm = Fabric(timeout=20).communicator("t")
    full, shard = torch.zeros(12 * world), torch.zeros(12)
    comm.all_gather(full, shard, "w").wait()
    comm.reduce_scatter(shard, full, "g").wait()
    comm.reduce_scatter(shard, full.bfloat16(), "g").wait()
    comm.all_reduce(torch.zeros(100), "n").wait()
    comm.broadcast(full, 0, "b").wait()
    comm.all_to_all(full, full.clone(), "a").wait()
    comm.all_to_all(torch.zeros(world), torch.zeros(world), "u", output_splits=[1] * world, input_splits=[1] * world).wait()
    if rank < 2:
        (comm.send(shard, 1, "s") if rank == 0 else comm.recv(shard, 0, "s")).wait()
    comm.exchange(torch.zeros(2, dtype=torch.int64), "e")
    counted = dict(comm.traffic.calls), dict(comm.traffic.bytes)
    comm.traffic.reset()
    assert not comm.traffic.calls and not comm.traffic.bytes
    return counted


def test_traffic() -> None:
    for world in (1, 3):
        for rank, (calls, sent) in enumerate(run_ranks(_traffic_alone if world == 1 else _traffic, world, timeout=60)):
            share = 12 * 4 * (world - 1)  # (N-1)/N of 12 N floats
            assert calls["reduce_scatter"] == 2 and calls["all_gather"] == 1
            assert sent["all_gather"] == share
            assert sent["reduce_scatter"] == share + share // 2
            padded = {1: 100, 3: 102}[world]
            assert sent["all_reduce"] == 2 * padded * 4 * (world - 1) // world
            if world == 3:
                assert sent["broadcast"] == share and sent["all_to_all"] == share + 4 * (world - 1)
                assert sent["exchange"] == 16 * (world - 1)
                assert sent.get("send", 0) == (48 if rank == 0 else 0)


def _traffic_alone(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
    init_distributed(verbose=False)
    comm = Fabric().communicator("t")
    full, shard = torch.ones(12), torch.zeros(12)
    comm.all_gather(full, shard, "w").wait()
    comm.reduce_scatter(shard, full, "g").wait()
    comm.reduce_scatter(shard, full.bfloat16(), "g").wait()
    comm.all_reduce(torch.zeros(100), "n").wait()
    return dict(comm.traffic.calls), dict(comm.traffic.bytes)


def _threads(rank: int, world: int) -> list[str]:
    """Two streams, each in its own order: what one rank gathers first the other may reduce first."""
    init_distributed(verbose=False)
    mesh = build_mesh(Fabric(timeout=10))
    works = []
    for i in range(20):
        full, shard = torch.full((64,), float(rank)), torch.full((32,), float(rank))
        steps = [
            lambda full=full, shard=shard, i=i: mesh.shard_params.all_gather(full, shard, f"w{i}"),
            lambda shard=shard, i=i: mesh.shard_grads.reduce_scatter(torch.empty(32), torch.ones(64), f"g{i}"),
        ]
        works += [step() for step in (steps if rank == 0 else reversed(steps))]
    for work in works:
        work.wait()
        assert work.done()
    mesh.close()
    import threading

    return [t.name for t in threading.enumerate() if t.name.startswith("zeroengine") and "health" not in t.name]


def test_two_streams_need_no_common_order_and_close_ends_their_threads() -> None:
    assert run_ranks(_threads, 2, timeout=60) == [[], []]


def _inference(rank: int, world: int) -> None:
    init_distributed(verbose=False)
    comm = Fabric(timeout=10).communicator("t")
    with torch.inference_mode():
        shard = torch.zeros(4)
        comm.reduce_scatter(shard, torch.ones(8), "g", scale=0.5, accumulate=True).wait()
        assert shard.tolist() == [1.0] * 4
    leaf = torch.zeros(4, requires_grad=True)
    comm.reduce_scatter(leaf.detach(), torch.ones(8), "g").wait()
    comm.all_reduce(leaf, "leaf", scale=0.5).wait()
    assert leaf.tolist() == [2.0] * 4 and leaf.grad_fn is None and leaf.is_leaf
    ((leaf * leaf).sum()).backward()


def test_inference_tensors_and_leaves() -> None:
    run_ranks(_inference, 2, timeout=60)
