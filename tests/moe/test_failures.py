"""A rank that ends while tokens travel ends every rank within seconds, with an error that names it and the operation."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from tests.moe.common import Case, build, cut, settings, tokens
from tests.ranks import run_ranks

LIMIT = 10.0  # seconds from the fault to the end of every rank


def _until(rank: int, world: int, fault: str, backward: bool, two_hop: bool) -> None:
    import zeroengine

    config = {"moe": {"two_hop": True, "ranks_per_node": 2}} if two_hop else {}
    case = Case(ep=world, stage=1 if two_hop else 3, config=config)
    engine, *_ = zeroengine.initialize(model=build(case), config=settings(case))
    group = engine.experts.group
    comm: Any = group.tokens if group.hops is None else group.hops.between
    plain = comm.all_to_all

    def fails(*args: Any, **kwargs: Any) -> Any:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ValueError("a fault of an expert's own")
        return None

    for step in range(4):
        x, y = tokens(case, step, 0)
        mine = cut(case, world, rank)
        if rank == 1 and step == 2 and not backward:
            comm.all_to_all = fails
        loss = engine(x[mine], y[mine], torch.tensor(world / len(x)))
        if rank == 1 and step == 2 and backward:
            comm.all_to_all = fails
        engine.backward(loss)
        comm.all_to_all = plain
        engine.step()


@pytest.mark.parametrize(("fault", "backward", "two_hop"), [("kill", False, False), ("kill", True, True), ("raise", True, False)])
def test_every_rank_ends_and_names_the_culprit(fault: str, backward: bool, two_hop: bool) -> None:
    outcomes = run_ranks(_until, 4, fault, backward, two_hop, timeout=60, failures=True)
    for rank in (0, 2, 3):
        error = outcomes[rank].error
        assert error is not None and "did not end" not in error, f"rank {rank}: {outcomes[rank]}"
        assert "rank 1" in error and "RankError" in error, error
    assert max(outcomes[r].seconds for r in (0, 2, 3)) - outcomes[1].seconds < LIMIT
