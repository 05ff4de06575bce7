"""Groups of the same ranks, made again after earlier ones have ended: as an engine does that follows another in one process."""

from __future__ import annotations

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


def test_a_group_does_not_meet_in_the_place_of_one_that_has_ended() -> None:
    got = run_ranks(_again, 4, timeout=60, env={"ZE_COMM": "gloo"})
    for rank, sums in enumerate(got):
        rows, columns = rank // 2 * 4 + 1, rank % 2 * 2 + 2
        assert sums == [x + 20 * turn for turn in range(6) for x in (rows, columns)]
