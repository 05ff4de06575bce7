"""Collectives through shared memory: the bits of the fixed order wherever tensors lie, nothing lost, nothing left behind."""

from __future__ import annotations

import os
import random
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.comm.processes import run_processes
from tests.comm.test_faults import LIMIT, check
from tests.ranks import run_ranks
from zeroengine.comm import Fabric, TorchCommunicator, Work, init_distributed
from zeroengine.comm.fixed_order import reduce_rows, wide_rows
from zeroengine.comm.shared_setup import SharedMemory
from zeroengine.errors import ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MIXED = ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64),
         (torch.float32, torch.bfloat16), (torch.bool, torch.bool), (torch.complex64, torch.complex64))  # fmt: skip
ROUNDS = 1_500_000  # elements of a slice: several rounds through the staging area


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Numbers of very different size, with denormals and infinities of one sign."""
    g = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype in INTEGERS or dtype is torch.bool:
        return torch.randint(0, 100, (numel,), generator=g).to(dtype)
    v = torch.randn(numel, generator=g, dtype=torch.float32) * 10.0 ** torch.randint(-7, 4, (numel,), generator=g)
    if numel > 40:
        v[7], v[11], v[12], v[13] = 1e-40, float("inf"), -1e-41 * (rank + 1), 6e-8 * (rank + 1)
    return v.to(dtype)


def place(comm: TorchCommunicator, data: Tensor, where: str) -> Tensor:
    """`data` in shared or in ordinary memory, or on some ranks in this and on others in that; off every alignment."""
    if where == "shared" or (where == "mixed" and comm.rank % 2):
        home = comm.empty(data.numel() + 100_000, data)
        return home[3 : data.numel() + 3].copy_(data)
    return torch.empty(data.numel() + 3, dtype=data.dtype)[3:].copy_(data)


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    a, b = a.view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    assert torch.equal(a, b), (a != b).nonzero()[:5]


def expected(comm: TorchCommunicator, rows: list[Tensor], dtype: torch.dtype, before: Tensor, scale: float, add: bool):
    stacked, out = torch.stack(rows), before.clone()
    if stacked.dtype != dtype:
        half = torch.empty((len(rows) + 1) // 2 * rows[0].numel(), dtype=dtype)
        stacked = wide_rows(stacked, dtype, half)
    reduce_rows(stacked, "sum", out, scale=scale, accumulate=add)
    return out


def _reduce_scatter(comm, share: int, wire: torch.dtype, dtype: torch.dtype, where: str, scale: float, add: bool) -> None:
    n, me = comm.size, comm.rank
    lo, hi = me * share, (me + 1) * share
    want = expected(comm, [values(r, n * share, wire)[lo:hi] for r in range(n)], dtype, values(77, share, dtype), scale, add)
    full = place(comm, values(me, n * share, wire), where)
    shard = place(comm, values(77, share, dtype), where)
    comm.reduce_scatter(shard, full, "g", scale=scale, accumulate=add).wait()
    full.zero_()  # ours again: no peer may see this
    same(shard, want)
    if wire == dtype and not add:
        full.copy_(values(me, n * share, wire))
        comm.reduce_scatter(full[lo:hi], full, "g in place", scale=scale).wait()
        same(full[lo:hi], want)


def _all_reduce(comm, numel: int, dtype: torch.dtype, where: str, scale: float) -> None:
    rows = [values(r, numel, dtype) for r in range(comm.size)]
    want = expected(comm, rows, dtype, torch.empty(numel, dtype=dtype), scale, False)
    t = place(comm, rows[comm.rank], where)
    comm.all_reduce(t, "norm", scale=scale).wait()
    same(t, want)


def _moves(comm, share: int, where: str) -> None:
    n, me = comm.size, comm.rank
    for in_place in (False, True):
        full = place(comm, torch.zeros(n * share), where)
        shard = full[me * share : (me + 1) * share] if in_place else place(comm, torch.zeros(share), where)
        shard.copy_(values(me, share, torch.float32))
        comm.all_gather(full, shard, "w").wait()
        if not in_place:
            shard.fill_(-1)
        same(full, torch.cat([values(r, share, torch.float32) for r in range(n)]))
        full.fill_(-2)
    for src in range(n):
        t = place(comm, values(me, share, torch.float32, src), where)
        comm.broadcast(t, src, "weights").wait()
        same(t, values(src, share, torch.float32, src))
        t.fill_(-3)
    sizes = [[(share * (i + 2 * j)) % (share + 7) for j in range(n)] for i in range(n)]
    blocks = [[values(i, sizes[i][j], torch.float32, j) for j in range(n)] for i in range(n)]
    source = place(comm, torch.cat(blocks[me]), where)
    receives = [sizes[i][me] for i in range(n)]
    target = place(comm, torch.empty(sum(receives)), where)
    comm.all_to_all(target, source, "experts", output_splits=receives, input_splits=sizes[me]).wait()
    source.fill_(-4)
    same(target, torch.cat([blocks[i][me] for i in range(n)]))


def _bits(rank: int, world: int, large: bool) -> None:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=60)
    comm = fabric.communicator("test")
    assert comm.moves_over == "shared memory"
    for where in ("shared", "ordinary", "mixed"):
        for share in (0, 1, 7, 5_003):
            _moves(comm, share, where)
            for dtype in FLOATS:
                for scale, add in ((1.0, False), (0.3, True)):
                    _reduce_scatter(comm, share, dtype, dtype, where, scale, add)
                    _all_reduce(comm, share, dtype, where, scale)
            for dtype in INTEGERS:
                _reduce_scatter(comm, share, dtype, dtype, where, 1.0, share == 7)
                _all_reduce(comm, share, dtype, where, 1.0)
            for wire, dtype in MIXED:
                scale = 0.7 if dtype.is_floating_point else 1.0
                _reduce_scatter(comm, share, wire, dtype, where, scale, False)
        if large:
            _moves(comm, ROUNDS, where)
            _reduce_scatter(comm, ROUNDS, torch.float32, torch.float32, where, 0.5, False)
            _reduce_scatter(comm, ROUNDS, torch.bfloat16, torch.float32, where, 1.0, True)
            _all_reduce(comm, 2 * ROUNDS + 1, torch.float32, where, 0.3)
    fabric.close()


@pytest.mark.parametrize(("world", "large"), [(2, True), (3, False), (4, False), (5, False)])
def test_bits_do_not_depend_on_where_tensors_lie(world: int, large: bool) -> None:
    run_ranks(_bits, world, large, timeout=240)


# -- many, at once -----------------------------------------------------------------------------------------------------


class Stream:
    """Random operations of one communicator, the same on every rank, checked when they are waited for."""

    def __init__(self, comm: TorchCommunicator, seed: int) -> None:
        self.comm = comm
        self.random = random.Random(seed)
        self.flying: deque[tuple] = deque()
        self.sent: deque[Work] = deque()
        self.done = 0

    def issue(self, step: int) -> None:
        comm, n, me = self.comm, self.comm.size, self.comm.rank
        kind = self.random.choice(("gather", "scatter", "reduce", "broadcast", "exchange", "barrier", "message"))
        size = self.random.choice((1, 3, 64, 700))
        if size == 700 and self.random.random() < 0.1:
            size = 60_000
        mine = comm.empty(n * size, torch.empty(0)) if kind != "reduce" else torch.empty(size)
        if kind == "gather":
            work = comm.all_gather(mine, torch.full((size,), float(step + me)), f"s{step}")
            self.flying.append((work, mine.view(n, -1), torch.arange(n).view(n, 1) + float(step)))
        elif kind == "scatter":
            mine.fill_(float(step + me))
            out = torch.empty(size)
            work = comm.reduce_scatter(out, mine, f"s{step}")
            self.flying.append((work, out, torch.tensor(float(n * step + n * (n - 1) // 2))))
        elif kind == "reduce":
            mine.fill_(float(step + me))
            self.flying.append((comm.all_reduce(mine, f"s{step}"), mine, torch.tensor(float(n * step + n * (n - 1) // 2))))
        elif kind == "broadcast":
            src = self.random.randrange(n)
            mine.fill_(float(step * 10 + me))
            self.flying.append((comm.broadcast(mine, src, f"s{step}"), mine, torch.tensor(float(step * 10 + src))))
        elif kind == "message":
            by = self.random.randrange(1, n)
            mine.fill_(float(step * 10 + me))
            self.sent.append(comm.send(mine, (me + by) % n, f"s{step}"))
            got, src = torch.empty_like(mine), (me - by) % n
            self.flying.append((comm.recv(got, src, f"s{step}"), got, torch.tensor(float(step * 10 + src))))
        elif kind == "exchange":
            got = comm.exchange(torch.tensor([step, me]), f"s{step}")
            assert got.tolist() == [[step, r] for r in range(n)]
            self.done += 1
        else:
            comm.barrier(f"s{step}")
            self.done += 1
        while len(self.flying) > self.random.randrange(6):
            self.check()

    def check(self) -> None:
        work, got, want = self.flying.popleft()
        work.wait()
        while self.sent and self.sent[0].done():
            self.sent.popleft().wait()
        assert bool((got == want).all()), (got, want)
        self.done += 1


def _storm(rank: int, world: int, count: int) -> int:
    init_distributed(verbose=False)
    fabric = Fabric(timeout=60)
    streams = [Stream(fabric.communicator(f"stream {i}"), i) for i in range(3)]
    order = random.Random(5)
    for step in range(count):
        streams[order.randrange(3)].issue(step)
    for stream in streams:
        while stream.flying:
            stream.check()
    done = sum(stream.done for stream in streams)
    fabric.close()
    return done


def test_ten_thousand_collectives_none_lost_or_mixed() -> None:
    """Three streams at once on four ranks, more than there may be cores: the load is their own."""
    assert run_ranks(_storm, 4, 10_000, timeout=280) == [10_000] * 4


# -- what is left -----------------------------------------------------------------------------------------------------


def _cycles(rank: int, world: int, count: int) -> list[tuple[int, int]]:
    init_distributed(verbose=False)
    counts = []
    for _ in range(count):
        fabric = Fabric(timeout=30)
        comms = [fabric.communicator(name) for name in ("a", "b")]
        full = comms[0].empty(400_000, torch.empty(0)).fill_(1.0)
        for comm in comms:
            comm.all_reduce(full, "w").wait()
        assert fabric.shared_bytes() > full.nbytes
        del full, comm
        comms.clear()
        fabric.close()
        assert fabric.shared_bytes() == 0
        maps = Path("/proc/self/maps").read_text().count("memfd:zeroengine")
        sockets = sum("memfd" in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files())
        counts.append((maps, sockets))
    return counts


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_nothing_is_held_after_closing() -> None:
    for counts in run_ranks(_cycles, 2, 20, timeout=120):
        assert counts == [(0, 0)] * 20


@pytest.mark.parametrize(("how", "says"), [("kill", "is gone"), ("stop", "is stopped")])
def test_a_rank_ends_inside_a_collective(how: str, says: str) -> None:
    before = set(os.listdir("/dev/shm"))
    ended = run_processes("inside", 3, 1, how, 10, victims=(1,) if how == "stop" else ())
    for rank in (0, 2):
        check(ended, rank, "RankError", rf"rank {rank} waits for all_reduce 'gradients", rf"rank 1\b.*{says}")
        assert ended[rank].seconds < LIMIT
    ours = {name for name in set(os.listdir("/dev/shm")) - before if "zero" in name}
    assert not ours


def _kind(rank: int, world: int, odd: dict[str, str]) -> str:
    if rank == world - 1:
        os.environ.update(odd)
    init_distributed(verbose=False)
    fabric = Fabric(timeout=30)
    comm = fabric.communicator("test")
    t = torch.ones(5)
    comm.all_reduce(t, "w").wait()
    assert t.tolist() == [float(world)] * 5
    fabric.close()
    return comm.moves_over


@pytest.mark.parametrize("odd", [{"ZE_COMM": "gloo"}, {"ZE_OPS": "twin"}], ids=str)
def test_one_rank_that_cannot_share_decides_for_all(odd: dict[str, str]) -> None:
    assert run_ranks(_kind, 2, odd, timeout=60) == ["Gloo", "Gloo"]


def test_an_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZE_COMM", "smoke")
    with pytest.raises(ConfigError, match="ZE_COMM=smoke"):
        SharedMemory(2)
