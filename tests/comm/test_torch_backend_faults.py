"""How the backend "zeroengine" of torch.distributed starts, and what it says of ranks that are late, die, stop or part ways."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.processes import run_processes
from tests.comm.test_faults import check
from tests.comm.test_torch_backend import segments, start
from tests.ranks import run_ranks
from zeroengine.errors import RankError
from zeroengine.ops.build import library

pytestmark = pytest.mark.skipif(library("shm").dll is None, reason="no native library; test_build.py fails where it should be")


def _other_starts(rank: int, world: int, path: str) -> list[float]:
    """A meeting in a file; the name through `init_distributed`; and the whole world again."""
    import zeroengine.comm.torch_backend  # noqa: F401
    from zeroengine.comm import Fabric, init_distributed

    found = []
    dist.init_process_group("zeroengine", init_method=f"file://{path}", rank=rank, world_size=world)
    t = torch.ones(3)
    dist.all_reduce(t)
    found.append(t[0].item())
    dist.destroy_process_group()
    init_distributed("cpu:zeroengine,cuda:nccl", verbose=False)
    dist.all_reduce(t)
    found.append(t[0].item())
    comm = Fabric(timeout=20).communicator("engine")  # an engine's streams beside it
    comm.all_reduce(t, "norm").wait()
    comm.close()
    found.append(t[0].item())
    try:
        dist.all_reduce(torch.ones(3, device="meta"))
    except Exception as error:
        found.append(float("no backend for meta tensors" in str(error)))
    dist.destroy_process_group()
    return found


def test_other_starts(tmp_path: Any) -> None:
    assert run_ranks(_other_starts, 2, str(tmp_path / "meeting"), timeout=90) == [[2.0, 4.0, 8.0, 1.0]] * 2


def _alone(rank: int, world: int) -> list[float]:
    ours, _ = start(rank, world)
    t, out = torch.ones(3), torch.empty(3)
    dist.all_reduce(t)
    dist.all_gather_into_tensor(out, t)
    dist.broadcast(t, 0)
    dist.barrier()
    dist.destroy_process_group()
    return [*t.tolist(), *out.tolist()]


def test_one_rank() -> None:
    assert run_ranks(_alone, 1, timeout=60) == [[1.0] * 6]


def _late(rank: int, world: int, comes: bool) -> str:
    """The last rank needs longer for its start than a rank may be silent, or never comes."""
    import zeroengine.comm.torch_backend  # noqa: F401

    last = rank == world - 1
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0, wait_for_workers=False)
    if last:
        time.sleep(7)
    if comes or not last:
        try:
            dist.init_process_group("zeroengine", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=40 if comes else 5))
        except RankError as error:
            return str(error)
        dist.barrier()
        dist.destroy_process_group()
    return ""


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_starts_late(comes: bool) -> None:
    found = run_ranks(_late, 3, comes, timeout=60)
    if comes:
        assert found == [""] * 3
    else:
        assert all(f"rank {r}: rank 2 of 3 did not come" in text and "within 5 s" in text for r, text in enumerate(found[:2]))


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "how", "says"),
    [
        ("message", "kill", "is gone"),
        ("ddp", "kill", "is gone"),
        ("all_reduce", "stop", "is stopped"),
    ],
)
def test_a_rank_ends(what: str, how: str, says: str) -> None:
    before = segments()
    ended = run_processes("backend", 3, 1, what, how, victims=(1,) if how == "stop" else ())
    for rank in (0, 2) if what in ("all_reduce", "ddp") else (0,):
        check(ended, rank, "RankError", rf"rank 1\b.*{says}")
    assert segments() == before


def test_a_rank_that_never_comes_is_named_after_the_timeout() -> None:
    ended = run_processes("backend", 2, 1, "all_reduce", "sleep", victims=(1,))
    check(ended, 0, "RankError", r"did not end within 4 s.*rank 1 .*user code at comm/faults.py")


def test_ranks_that_part_ways_are_told_so() -> None:
    ended = run_processes("backend", 2, 1, "all_reduce", "other")
    check(ended, 0, "DivergenceError", "rank 0.*all_reduce.*5 x float32", "rank 1.*all_gather.*10 x float32")
    check(ended, 1, "DivergenceError", "rank 0.*all_reduce.*5 x float32", "rank 1.*all_gather.*10 x float32")
