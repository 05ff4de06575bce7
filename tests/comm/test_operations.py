"""Every operation on 1 to 4 ranks against a plain reference, with odd sizes, aliasing, narrow wires and integers."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.comm.fixed_order import reduce_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)


def make(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(numel, generator=g) * 8).to(dtype)


def tree(rows: list[torch.Tensor]) -> torch.Tensor:
    """The promised order, written as it is said: neighbours first, an odd one carried up."""
    while len(rows) > 1:
        rows = [rows[i] + rows[i + 1] if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
    return rows[0]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(a, b), (a[:8], b[:8])


def _operations(rank: int, world: int, over: str) -> dict[str, int]:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=20)
    comm = fabric.communicator("test")
    assert world == 1 or comm.moves_over == over
    assert (comm.rank, comm.size, comm.ranks) == (rank, world, tuple(range(world)))
    for share in (1, 7, 33, 5000):
        for dtype in DTYPES:
            _gather(comm, share, dtype)
            for scale, accumulate in ((1.0, False), (0.3, False), (1.0, True), (0.3, True)):
                if dtype.is_floating_point or scale == 1.0:
                    _reduce_scatter(comm, share, dtype, dtype, scale, accumulate)
        _reduce_scatter(comm, share, torch.bfloat16, torch.float32, 0.3, False)
        _reduce_scatter(comm, share, torch.float16, torch.float32, 0.3, True)
    for numel in (0, 1, 5, 16 * 1024 + 3, 60_000):
        for dtype in DTYPES:
            _all_reduce(comm, numel, dtype)
    _others(comm)
    pool = comm.pool_bytes()
    assert (pool > 0) == (world > 1)
    fabric.close()
    assert comm.pool_bytes() == 0
    return {"pool": pool}


def _gather(comm, share, dtype) -> None:
    want = torch.cat([make(r, share, dtype) for r in range(comm.size)])
    full = comm.empty(share * comm.size, torch.empty(0, dtype=dtype))
    comm.all_gather(full, make(comm.rank, share, dtype), "w").wait()
    same(full, want)
    full.zero_()
    own = full[comm.rank * share : (comm.rank + 1) * share]
    own.copy_(make(comm.rank, share, dtype))
    work = comm.all_gather(full, own, "w in place")
    work.wait()
    work.wait()
    assert work.done()
    same(full, want)


def _reduce_scatter(comm, share, wire, dtype, scale, accumulate) -> None:
    lo, hi = comm.rank * share, (comm.rank + 1) * share
    rows = [make(r, share * comm.size, wire)[lo:hi].to(dtype) for r in range(comm.size)]
    want = tree(rows)
    if scale != 1.0:
        want = want * scale
    full = make(comm.rank, share * comm.size, wire)
    before = make(99, share, dtype)
    shard = before.clone()
    comm.reduce_scatter(shard, full.clone(), "g", scale=scale, accumulate=accumulate).wait()
    same(shard, before + want if accumulate else want)
    if wire == dtype and not accumulate:
        comm.reduce_scatter(full[lo:hi], full, "g in place", scale=scale).wait()
        same(full[lo:hi], want)


def _all_reduce(comm, numel, dtype) -> None:
    rows = [make(r, numel, dtype) for r in range(comm.size)]
    for op, want in (
        ("sum", tree(rows)),
        ("max", torch.stack(rows).amax(0) if numel else rows[0]),
        ("min", torch.stack(rows).amin(0) if numel else rows[0]),
    ):
        t = make(comm.rank, numel, dtype)
        comm.all_reduce(t, "norm", op=op).wait()
        same(t, want)
    if dtype.is_floating_point:
        t = make(comm.rank, numel, dtype)
        comm.all_reduce(t, "norm", scale=0.3).wait()
        same(t, tree(rows) * 0.3)


def _others(comm) -> None:
    n, me = comm.size, comm.rank
    for src in range(n):
        t = make(me, 33, torch.float32)
        comm.broadcast(t, src, "weights").wait()
        same(t, make(src, 33, torch.float32))
    blocks = torch.arange(n * 3) + 100 * me
    out = torch.empty_like(blocks)
    comm.all_to_all(out, blocks, "tokens").wait()
    same(out, torch.cat([torch.arange(me * 3, me * 3 + 3) + 100 * r for r in range(n)]))
    # rank i sends (i + j) % 3 elements to rank j: zeros and whole empty ranks included
    sends, receives = [(me + j) % 3 for j in range(n)], [(i + me) % 3 for i in range(n)]
    source = torch.cat([torch.full((c,), 10.0 * me + j) for j, c in enumerate(sends)])
    target = torch.empty(sum(receives))
    comm.all_to_all(target, source, "experts", output_splits=receives, input_splits=sends).wait()
    same(target, torch.cat([torch.full((c,), 10.0 * i + me) for i, c in enumerate(receives)]))
    same(comm.exchange(torch.tensor([me, 7]), "counts"), torch.tensor([[r, 7] for r in range(n)]))
    same(comm.exchange(torch.tensor(me), "one"), torch.tensor([[r] for r in range(n)]))
    same(comm.exchange(torch.tensor([[me, 1], [2, 3]]), "rows"), torch.tensor([[r, 1, 2, 3] for r in range(n)]))
    assert comm.exchange(torch.ones(2, 0), "nothing").shape == (n, 0)
    comm.barrier("end")
    if n > 1:
        _ring(comm)


def _ring(comm) -> None:
    n, me = comm.size, comm.rank
    works, got = [], []
    for step in range(3):
        t = make(me, 100 + step, torch.bfloat16)
        works.append(comm.send(t, (me + 1) % n, f"ring {step}"))
        got.append(torch.empty(100 + step, dtype=torch.bfloat16))
        works.append(comm.recv(got[-1], (me - 1) % n, f"ring {step}"))
    for work in reversed(works):
        work.wait()
    for step, t in enumerate(got):
        same(t, make((me - 1) % n, 100 + step, torch.bfloat16))


@pytest.mark.parametrize(("world", "over"), [(1, ""), *((w, o) for w in (2, 3, 4) for o in ("shared memory", "Gloo"))])
def test_operations(world: int, over: str) -> None:
    run_ranks(_operations, world, over, timeout=60, env={"ZE_COMM": "gloo" if over == "Gloo" else "auto"})


@pytest.mark.parametrize("n", range(1, 18))
def test_order_of_the_sum(n: int) -> None:
    rows = torch.randn(n, 19) * 10.0 ** torch.randint(-6, 7, (n, 19))
    out = torch.empty(19)
    reduce_rows(rows.clone(), "sum", out)
    same(out, tree(list(rows)))
