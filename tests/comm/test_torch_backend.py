"""The backend "zeroengine" of torch.distributed against Gloo: every operation, DDP, FSDP2, meshes. See test_torch_backend_faults.py."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks
from zeroengine.ops.build import library

pytestmark = pytest.mark.skipif(library("shm").dll is None, reason="no native library; test_build.py fails where it should be")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
OPS = ("SUM", "MAX", "MIN", "PRODUCT")
CASES: dict[str, Callable[[Any, Any], None]] = {}


def case(fn: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    CASES[fn.__name__.strip("_")] = fn
    return fn


def start(rank: int, world: int, **more: Any) -> tuple[Any, Any]:
    """The default group of the backend, and Gloo beside it."""
    import zeroengine.comm.torch_backend  # noqa: F401

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0, wait_for_workers=False)
    dist.init_process_group("zeroengine", store=store, rank=rank, world_size=world, **more)
    return dist.group.WORLD, dist.new_group(backend="gloo")


def segments() -> set[str]:
    """Of this package, in the file system: others run beside this test."""
    return {name for name in os.listdir("/dev/shm") if "zero" in name}


def make(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sums and products over four ranks are exact in every type."""
    g = torch.Generator().manual_seed(31 * rank + numel)
    return torch.randint(0, 3, (numel,), generator=g).to(dtype)


def same(mine: Any, other: Any, what: str) -> None:
    for a, b in zip(mine, other, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}\n{a}\n{b}"


# -- each operation ----------------------------------------------------------------------------------------------------


def both(ours: Any, gloo: Any, run: Callable[[Any], list[Tensor]], what: str) -> None:
    same(run(ours), run(gloo), what)


@case
def _reductions(ours: Any, gloo: Any) -> None:
    rank, size = dist.get_rank(), ours.size()
    for dtype in FLOATS + INTEGERS:
        names = OPS + (("BAND", "BOR", "BXOR") if dtype in INTEGERS else ())
        for name in names:
            op = getattr(dist.ReduceOp, name)
            for numel in (5, 40_001 if size == 2 else 5_001):

                def all_reduce(group: Any, op: Any = op, numel: int = numel, dtype: torch.dtype = dtype) -> list[Tensor]:
                    t = make(rank, numel, dtype)
                    dist.all_reduce(t, op, group=group)
                    return [t]

                both(ours, gloo, all_reduce, f"all_reduce {name} {dtype} {numel}")

            def reduce(group: Any, op: Any = op, dtype: torch.dtype = dtype) -> list[Tensor]:
                t = make(rank, 7, dtype)
                dist.reduce(t, size - 1, op, group=group)
                return [t] if rank == size - 1 else []

            both(ours, gloo, reduce, f"reduce {name} {dtype}")

        def scattered(group: Any, dtype: torch.dtype = dtype) -> list[Tensor]:
            out, single = torch.empty(6, dtype=dtype), torch.empty(3, 2, dtype=dtype)
            dist.reduce_scatter(out, [make(rank + r, 6, dtype) for r in range(size)], group=group)
            dist.reduce_scatter_tensor(single, make(rank, 6 * size, dtype).view(3 * size, 2), group=group)
            return [out, single]

        both(ours, gloo, scattered, f"reduce_scatter {dtype}")


@case
def _averages(ours: Any, gloo: Any) -> None:
    rank, size = dist.get_rank(), ours.size()
    for dtype in (torch.float32, torch.float64):
        t = torch.randn(1001, generator=torch.Generator().manual_seed(rank)).to(dtype)
        u, out = t.clone(), torch.empty(7, dtype=dtype)
        dist.all_reduce(t, dist.ReduceOp.AVG, group=ours)
        dist.all_reduce(u, dist.ReduceOp.AVG, group=gloo)
        torch.testing.assert_close(t, u, rtol=1e-6, atol=1e-7)
        dist.reduce_scatter_tensor(out, torch.full((7 * size,), rank + 1.0, dtype=dtype), dist.ReduceOp.AVG, group=ours)
        torch.testing.assert_close(out, torch.full((7,), (size + 1) / 2, dtype=dtype))
    for wrong, said in ((dist.ReduceOp.AVG, "average of torch.int32"),):
        with pytest.raises(ValueError, match=said):
            dist.all_reduce(torch.ones(3, dtype=torch.int32), wrong, group=ours)


@case
def _movements(ours: Any, gloo: Any) -> None:
    rank, size = dist.get_rank(), ours.size()
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        mine = make(rank, 6, dtype)

        def moved(group: Any, dtype: torch.dtype = dtype, mine: Tensor = mine) -> list[Tensor]:
            found = [torch.empty(6, dtype=dtype) for _ in range(size)]
            dist.all_gather(found, mine, group=group)
            full = torch.empty(6 * size, dtype=dtype)
            dist.all_gather_into_tensor(full, mine, group=group)
            cast = mine.clone()
            dist.broadcast(cast, size - 1, group=group)
            swapped = torch.empty(2 * size, dtype=dtype)
            dist.all_to_all_single(swapped, make(rank, 2 * size, dtype), group=group)
            return [*found, full, cast, swapped]

        both(ours, gloo, moved, f"movements {dtype}")
        gathered = [torch.empty(6, dtype=dtype) for _ in range(size)] if rank == 1 else None
        dist.gather(mine, gathered, dst=1, group=ours)
        same(gathered or [], [make(r, 6, dtype) for r in range(size)] if rank == 1 else [], f"gather {dtype}")
        part = torch.empty(3, dtype=dtype)
        dist.scatter(part, [make(r, 3, dtype) for r in range(size)] if rank == 0 else None, src=0, group=ours)
        same([part], [make(rank, 3, dtype)], f"scatter {dtype}")
    sizes = [[(i + 2 * j) % 4 for j in range(size)] for i in range(size)]
    receives = [sizes[i][rank] for i in range(size)]

    def uneven(group: Any) -> list[Tensor]:
        out = torch.empty(sum(receives), 3)
        dist.all_to_all_single(out, make(rank, 3 * sum(sizes[rank]), torch.float32).view(-1, 3), receives, sizes[rank], group=group)
        return [out]

    both(ours, gloo, uneven, "uneven blocks")
    outputs = [torch.empty(n, 2) for n in receives]
    dist.all_to_all(outputs, [torch.full((n, 2), 10.0 * rank + j) for j, n in enumerate(sizes[rank])], group=ours)
    assert [t.tolist() for t in outputs] == [[[10.0 * i + rank] * 2] * n for i, n in enumerate(receives)]


@case
def _layouts(ours: Any, gloo: Any) -> None:
    """What is not contiguous is moved by value."""
    rank, size = dist.get_rank(), ours.size()
    wide = torch.arange(24.0).view(4, 6) + rank
    dist.all_reduce(wide[:, ::2], group=ours)
    want = torch.arange(24.0).view(4, 6) + rank
    want[:, ::2] = size * torch.arange(24.0).view(4, 6)[:, ::2] + sum(range(size))
    assert torch.equal(wide, want)
    image = torch.full((1, 2, 3, 3), float(rank)).to(memory_format=torch.channels_last)
    dist.broadcast(image, 1, group=ours)
    assert bool((image == 1).all())
    target = torch.zeros(2 * size, 2).t()
    dist.all_gather_into_tensor(target, torch.full((2, 2), float(rank)), group=ours)
    assert target.reshape(-1).tolist() == [float(r) for r in range(size) for _ in range(4)]
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf, group=ours)
    assert leaf.tolist() == [float(size)] * 3 and leaf.is_leaf


@case
def _objects_and_sparse(ours: Any, gloo: Any) -> None:
    rank, size = dist.get_rank(), ours.size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank}, group=ours)
    assert found == [{"rank": r, "text": "x" * r} for r in range(size)]
    values: list[Any] = [{"a": 1}, "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(values, src=0, group=ours)
    assert values == [{"a": 1}, "b"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0, group=ours)
    assert mine == [f"for {rank}"]
    row = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (size + 1,))
    dense = row.to_dense()
    dist.all_reduce(row, group=ours)
    dist.all_reduce(dense, group=ours)
    assert torch.equal(row.to_dense(), dense)


@case
def _handles(ours: Any, gloo: Any) -> None:
    """Works, futures and what is chained on them, many at once and out of order."""
    size = ours.size()
    tensors = [torch.full((50_000,), float(i)) for i in range(20)]
    works = [dist.all_reduce(t, group=ours, async_op=True) for t in tensors]
    for i in (19, 3, 0):
        assert works[i].wait() is True and works[i].is_completed() and works[i].is_success()
    works[18].wait(timedelta(seconds=30))
    future = dist.all_reduce(torch.ones(3), group=ours, async_op=True).get_future()

    def again(done: Any) -> Tensor:  # waits for an operation inside of a callback, as communication hooks do
        return dist.all_reduce(done.value()[0], group=ours, async_op=True).get_future().wait()[0]

    assert future.then(again).wait().tolist() == [float(size * size)] * 3
    assert all(torch.equal(t, torch.full_like(t, float(i * size))) for i, t in enumerate(tensors))
    with dist.distributed_c10d._coalescing_manager(group=ours, async_ops=True) as manager:
        few = [torch.full((4,), float(i)) for i in range(3)]
        for t in few:
            dist.all_reduce(t, group=ours)
    manager.wait()
    with dist.distributed_c10d._coalescing_manager(group=ours, device=torch.device("cpu")):
        for t in few:
            dist.broadcast(t, 0, group=ours)
    assert [t[0].item() for t in few] == [0.0, float(size), 2.0 * size]


@case
def _messages(ours: Any, gloo: Any) -> None:
    rank, size = dist.get_rank(), ours.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for numel in (1, 1000, 900_000):
        out, t = torch.empty(numel, dtype=torch.bfloat16), torch.full((numel,), float(rank), dtype=torch.bfloat16)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, right), dist.P2POp(dist.irecv, out, left)]):
            work.wait()
        assert bool((out == left).all())
    # other tags may be received in another order than they were sent
    works = [dist.isend(torch.full((3,), float(tag)), right, tag=tag) for tag in (1, 2, 0)]
    for tag in (0, 2, 1):
        t = torch.empty(3)
        dist.recv(t, left, tag=tag)
        assert t.tolist() == [float(tag)] * 3
    for work in works:
        work.wait()
    for tag in (0, 5):
        if rank:
            dist.send(torch.tensor([rank, tag]), 0, tag=tag)
        else:
            seen = {}
            for _ in range(size - 1):
                t = torch.empty(2, dtype=torch.int64)
                source = dist.recv(t, tag=tag)
                seen[source] = t.tolist()
            assert seen == {r: [r, tag] for r in range(1, size)}
    if rank == 0:
        dist.send_object_list(["to", {"one": 1}], 1)
    elif rank == 1:
        values: list[Any] = [None, None]
        dist.recv_object_list(values, 0)
        assert values == ["to", {"one": 1}]


@case
def _functions(ours: Any, gloo: Any) -> None:
    """Functional collectives, whose calls come from C++, and DTensor on them."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    rank, size = dist.get_rank(), ours.size()
    mine = torch.full((2, 3), float(rank + 1))
    assert functional.all_reduce(mine, "sum", ours).tolist() == [[size * (size + 1) / 2] * 3] * 2
    assert functional.all_gather_tensor(mine, 0, ours).tolist() == [[r + 1.0] * 3 for r in range(size) for _ in range(2)]
    assert functional.reduce_scatter_tensor(mine.repeat(size, 1), "sum", 0, ours).shape == (2, 3)
    assert functional.all_to_all_single(mine.repeat(size, 1), None, None, ours).tolist()[0] == [1.0] * 3
    assert functional.broadcast(mine, 1, ours).tolist() == [[2.0] * 3] * 2
    mesh = DeviceMesh.from_group(ours, "cpu")
    whole = torch.arange(5.0 * size * 3).view(5 * size, 3)
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(spread.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal((spread * 1).redistribute(mesh, [Replicate()]).to_local(), whole)


@case
def _groups(ours: Any, gloo: Any) -> None:
    """Groups of some ranks, overlapping, made and destroyed; a mesh of two dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = dist.get_rank(), ours.size()
    for _ in range(2):
        pairs = [dist.new_group([r, (r + 1) % size] if r + 1 < size else [0, size - 1]) for r in range(size)]
        for r, group in enumerate(pairs):
            members = sorted({r, (r + 1) % size})
            if rank in members:
                assert dist.get_backend(group) == "zeroengine" and group.moves_over == "shared memory"
                t = torch.tensor([float(rank)])
                dist.all_reduce(t, group=group)
                assert t.item() == sum(members)
        for group in reversed(pairs):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
    local = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=60)) if rank < 2 else None
    if local is not None:
        dist.barrier(local)
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name in ("dp", "tp"):
            t = torch.tensor([float(rank)])
            dist.all_reduce(t, group=mesh.get_group(name))
            assert t.item() == sum(mesh[name].mesh.tolist())


@case
def _allocated(ours: Any, gloo: Any) -> None:
    """Tensors that peers read where they lie."""
    rank, size = dist.get_rank(), ours.size()
    backend = ours._get_backend(torch.device("cpu"))
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    shard = backend.allocate_tensor(300_000, dtype=torch.float32, device=torch.device("cpu")).fill_(rank)
    full = torch.empty(300_000 * size)
    dist.all_gather_into_tensor(full, shard, group=ours)
    shard.fill_(-1)
    assert full.view(size, -1).amax(1).tolist() == full.view(size, -1).amin(1).tolist() == [float(r) for r in range(size)]


# -- training ----------------------------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def _train(model: nn.Module, rank: int) -> Iterator[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss)


def _equal(ours: list[float], gloo: list[float], size: int, rel: float = 1e-5) -> None:
    if size == 2:  # two summands have one order only
        assert ours == gloo
    assert ours == pytest.approx(gloo, rel=rel), f"{ours} {gloo}"


@case
def _ddp(ours: Any, gloo: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), ours.size()

    def losses(group: Any, how: str) -> list[float]:
        cap = 25 if how == "low rank" else 0.005  # its callbacks issue operations: those of several buckets have no common order
        model = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=cap, find_unused_parameters=how == "unused")
        if how == "fp16":
            model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        if how == "low rank":
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return list(_train(model, rank))

    for how in ("plain", "unused", "fp16", "low rank"):
        _equal(losses(ours, how), losses(gloo, how), size, 1e-5 if how in ("plain", "unused") else 1e-2)


@case
def _fully_shard(ours: Any, gloo: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(), ours.size()

    def losses(mesh: DeviceMesh, allocate: bool = False) -> list[float]:
        model = _model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        whole = fully_shard(model, mesh=mesh)
        if allocate:
            whole.set_allocate_memory_from_process_group_for_comm(True)
        return list(_train(whole, rank))

    want = losses(DeviceMesh.from_group(gloo, "cpu"))
    _equal(losses(init_device_mesh("cpu", (size,))), want, size)
    _equal(losses(DeviceMesh.from_group(ours, "cpu"), True), want, size)
    if size == 4:
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        _equal(losses(hybrid), want, size)


# -- one launch for each number of ranks -------------------------------------------------------------------------------


def _all_cases(rank: int, world: int, names: tuple[str, ...]) -> dict[str, str]:
    before = segments()
    ours, gloo = start(rank, world)
    assert ours.moves_over == os.environ.get("EXPECT", "shared memory"), ours.moves_over
    outcomes = {}
    for name in names:
        try:
            CASES[name](ours, gloo)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        left: list[Any] = [None] * world
        dist.all_gather_object(left, outcomes[name], group=gloo)
        if any(left):  # ranks may be in different places now
            outcomes[name] = "\n".join(text for text in left if text)
            break
    else:
        dist.destroy_process_group()
        outcomes["/dev/shm"] = " ".join(segments() - before)
    return outcomes


@cache
def outcomes(world: int, names: tuple[str, ...], env: tuple[tuple[str, str], ...] = ()) -> list[dict[str, str]]:
    return run_ranks(_all_cases, world, names, timeout=150, env=dict(env))


@pytest.mark.parametrize("name", [*CASES, "/dev/shm"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_as_gloo(world: int, name: str) -> None:
    for rank, found in enumerate(outcomes(world, tuple(CASES))):
        assert name in found, f"{name} was not reached: {list(found.values())[-1]}"
        assert not found[name], f"rank {rank}\n{found[name]}"


def test_over_gloo_where_memory_is_not_shared() -> None:
    names = ("reductions", "movements", "handles", "messages", "objects_and_sparse")
    for found in outcomes(2, names, (("ZE_COMM", "gloo"), ("EXPECT", "Gloo"))):
        assert all(name in found and not found[name] for name in names), found


def _on_hosts(rank: int, world: int) -> dict[str, str]:
    os.environ["ZE_HOST"] = f"host {rank // 2}"
    return _all_cases(rank, world, ("reductions", "movements", "messages", "fully_shard"))


def test_between_hosts() -> None:
    env = {"EXPECT": "shared memory in a host, Gloo between hosts"}
    for found in run_ranks(_on_hosts, 4, timeout=150, env=env):
        assert not any(found.values()), found
