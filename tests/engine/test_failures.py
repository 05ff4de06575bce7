"""A rank that fails ends every rank within seconds, with an error that names it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import torch

from tests.engine.models import TinyLM, config, tokens
from tests.ranks import Outcome, run_ranks

LIMIT = 10.0  # seconds from the fault to the end of every rank


def train_until(rank: int, world: int, stage: int, fault: str, culprit: int) -> None:
    import zeroengine

    torch.manual_seed(0)
    engine, *_ = zeroengine.initialize(model=TinyLM(), config=config(stage))
    for step in range(50):
        if step == 3:
            if rank == culprit:
                misbehave(fault, engine)
        engine.backward(engine(*tokens(step, 0, rank)))
        engine.step()


def misbehave(fault: str, engine: Any) -> None:
    if fault == "raise":
        raise ValueError("a fault of the user's own")
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "barrier":
        torch.distributed.barrier()
    if fault == "eval":  # the others train
        for _ in range(50):
            with torch.no_grad():
                engine(*tokens(0, 0, 0))
        torch.distributed.barrier()
    if fault == "leave":
        sys.exit(0)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("fault", ["raise", "exit", "kill", "barrier"])
def test_every_rank_ends_and_names_the_culprit(stage: int, fault: str) -> None:
    check(stage, fault, culprit=1)


@pytest.mark.parametrize("fault", ["stop", "leave", "kill", "eval"])
def test_other_faults_of_rank_0_at_stage_3(fault: str) -> None:
    check(3, fault, culprit=0)


def check(stage: int, fault: str, culprit: int) -> None:
    stopped = culprit if fault == "stop" else None
    outcomes: list[Outcome] = run_ranks(train_until, 3, stage, fault, culprit, timeout=60, failures=True, victim=stopped)
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            continue
        assert outcome.error is not None and "did not end" not in outcome.error, f"rank {rank}: {outcome}"
        assert f"rank {culprit}" in outcome.error, outcome.error
        assert "RankError" in outcome.error or "DivergenceError" in outcome.error, outcome.error
    others = [o.seconds for r, o in enumerate(outcomes) if r != culprit]
    if fault not in ("stop", "barrier", "eval"):  # the culprit's own end marks the time of the fault
        assert max(others) - outcomes[culprit].seconds < LIMIT
