"""A pipelined model trains as the unsplit one does, whatever the schedule, the split and the sharding."""

from __future__ import annotations

from typing import Any

import pytest

import zeroengine
from tests.pipeline import common
from tests.ranks import run_ranks

Case = tuple[str, int, int, int]  # schedule, stages a rank, micro-batches, ZeRO stage


def _train(rank: int, world: int, pipeline: int, cases: list[Case], weighted: bool, more: dict[str, Any]) -> list[Any]:
    zeroengine.init_distributed(verbose=False)
    data_rank = rank % (world // pipeline)
    found, engines = [], []
    for schedule, chunks, micro, stage in cases:
        model = common.module(pipeline, schedule=schedule, virtual_stages=chunks, loss_weight=common.targets if weighted else None)
        engine, *_ = zeroengine.initialize(model=model, config=common.config(stage, micro, **more))
        losses, norms = [], []
        for step in range(2):
            losses.append(float(engine.train_batch(common.batches(step, micro, data_rank, weighted))))
            norms.append(engine.get_global_grad_norm())
        planned = engine.schedule(micro).peak_live[model.stage_rank]
        assert engine.last_run.peak_live == planned, f"{schedule}: held {engine.last_run.peak_live}, planned {planned}"
        found.append((losses, norms, engine.full_state_dict()))
        engines.append(engine)
    return found


def compare(results: list[list[Any]], cases: list[Case], data_ranks: int, weighted: bool = False, clip: float = 0.0) -> None:
    for number, (schedule, chunks, micro, stage) in enumerate(cases):
        losses, weights, norms = common.single(micro, data_ranks, weighted=weighted, clip=clip)
        for rank, result in enumerate(results):
            got_losses, got_norms, got = result[number]
            where = f"{schedule} x {chunks}, {micro} micro-batches, ZeRO {stage}, rank {rank}"
            assert got_losses == pytest.approx(losses, rel=1e-6, abs=1e-6), where
            assert got_norms == pytest.approx(norms, rel=1e-5), where
            if rank:
                assert got is None
                continue
            assert set(got) == set(weights), where
            for name, value in weights.items():
                far = float((got[name] - value).abs().max())
                assert far <= 2e-6, f"{where}: {name} differs by {far}"


def test_every_schedule_on_two_ranks() -> None:
    cases: list[Case] = [
        ("gpipe", 1, 4, 0), ("1f1b", 1, 4, 1), ("1f1b", 1, 8, 3), ("zb-h1", 1, 4, 2), ("zb-h1", 1, 4, 3),
        ("interleaved", 2, 4, 0),
        ("interleaved", 2, 4, 2), ("zb-v", 2, 4, 1), ("zb-v", 2, 4, 3), ("dualpipe-v", 2, 4, 2), ("dualpipe-v", 2, 8, 0),
        ("1f1b", 1, 1, 0),
    ]  # fmt: skip
    compare(run_ranks(_train, 2, 2, cases, False, {}, timeout=280), cases, 1)


def test_sharded_inside_the_stages() -> None:
    """2 stages x 2 data-parallel ranks, ZeRO 0 to 3, with clipping by the norm over all stages."""
    cases: list[Case] = [
        ("1f1b", 1, 4, 0), ("1f1b", 1, 4, 1), ("zb-h1", 1, 4, 2), ("1f1b", 1, 4, 3), ("interleaved", 2, 4, 3), ("zb-v", 2, 4, 2),
    ]  # fmt: skip
    compare(run_ranks(_train, 4, 2, cases, False, {"gradient_clipping": 0.5}, timeout=280), cases, 2, clip=0.5)


def test_four_stages() -> None:
    cases: list[Case] = [("1f1b", 1, 8, 1), ("zb-v", 2, 4, 3), ("interleaved", 2, 4, 2)]
    compare(run_ranks(_train, 4, 4, cases, False, {}, timeout=280), cases, 1)


def test_tokens_weigh_the_same_and_lengths_change() -> None:
    cases: list[Case] = [("1f1b", 1, 4, 2), ("zb-h1", 1, 3, 0)]
    compare(run_ranks(_train, 4, 2, cases, True, {}, timeout=200), cases, 2, weighted=True)
