"""Groups of the same ranks, made again after earlier ones have ended: as an engine does that follows another in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed


def _again(rank: int, world: int) -> list[int]:
    init_distributed(verbose=False)
    sums = []
    for turn in range(6):
        fabric = Fabric(timeout=30)
        for name, ranks in (("rows", (rank // 2 * 2, rank // 2 * 2 + 1)), ("columns", (rank % 2, rank % 2 + 2))):
            comm = fabric.communicator(name, ranks)
            value = torch.tensor([rank + 10 * turn])
            comm.all_reduce(value, "values").wait()
            sums.append(int(value))
        fabric.close()
    return sums


@pytest.mark.parametrize("comm", ["gloo", "auto"])
def test_a_group_does_not_meet_in_the_place_of_one_that_has_ended(comm: str) -> None:
    got = run_ranks(_again, 4, timeout=60, env={"ZE_COMM": comm})
    for rank, sums in enumerate(got):
        rows, columns = rank // 2 * 4 + 1, rank % 2 * 2 + 2
        assert sums == [x + 20 * turn for turn in range(6) for x in (rows, columns)]


def _threads_of_gloo() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gloo") for name in names)


def _beside_gloo(rank: int, world: int) -> tuple[list[int], int]:
    init_distributed(verbose=False)
    before = _threads_of_gloo()
    fabric = Fabric(timeout=30)
    ring = fabric.communicator("ring")
    pair = fabric.communicator("pair", (0, 2)) if rank != 1 else ring
    sent, got, value = torch.tensor([rank]), torch.empty(1, dtype=torch.int64), torch.tensor([rank + 1])
    work = ring.send(sent, (rank + 1) % world, "message")
    ring.recv(got, (rank - 1) % world, "message").wait()
    work.wait()
    if pair is not ring:
        pair.all_reduce(value, "value").wait()
    more = _threads_of_gloo() - before
    fabric.close()
    return [int(got), int(value)], more


def test_groups_of_one_host_leave_no_thread_of_gloo() -> None:
    """Each such thread looks for news a hundred times a second, beside the training."""
    got = run_ranks(_beside_gloo, 3, timeout=60)
    assert got == [([2, 4], 0), ([0, 2], 0), ([1, 4], 0)]
