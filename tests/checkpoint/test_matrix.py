"""Saved by any stage on any number of ranks, loaded by any other: weights, masters and moments to the last bit, and the losses
that follow are those of a run that had the state all along."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.checkpoint.engines import build, fill, scramble, train, world_of, wrong
from tests.ranks import run_ranks

STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
# Every pair of numbers of ranks with every stage that saved, and so every pair of stages.
LOADS = [(s, n, (s + n + m) % 4, m) for n, m in itertools.product(WORLDS, WORLDS) for s in STAGES]


def _dtype(stage: int, world: int) -> str:
    return "bf16" if (stage + world) % 2 else "fp32"


def _loads_as(load: tuple[int, int, int, int]) -> str:
    s, n, _, m = load
    return {"fp32": "bf16", "bf16": "fp32"}[_dtype(s, n)] if (s + m) % 3 == 0 else _dtype(s, n)


def _never_stopped(rank: int) -> dict[tuple[str, str], list[float]]:
    """Losses from the right state, for each precision that saved (in which a frozen weight is rounded) and that trains."""
    losses = {}
    for saved, dtype in itertools.product(("fp32", "bf16"), repeat=2):
        engine = build(0, dtype)
        fill(engine, frozen_as=saved)
        losses[saved, dtype] = train(engine, 0, 2, rank)
        engine.destroy()
    return losses


def _matrix(rank: int, world: int, folder: str) -> dict[tuple[int, int, int, int], list[str]]:
    found: dict[tuple[int, int, int, int], list[str]] = {}
    directory = Path(folder)
    for n in WORLDS:
        with world_of(n, rank, world, directory, f"save{n}") as takes_part:
            for stage in STAGES if takes_part else ():
                engine = build(stage, _dtype(stage, n))
                fill(engine)
                engine.save_checkpoint(directory / f"{stage}-{n}")
                engine.destroy()
    for m in WORLDS:
        with world_of(m, rank, world, directory, f"load{m}") as takes_part:
            # The precision that saved and the other one: masters become weights, weights become masters.
            expected = _never_stopped(rank) if takes_part else {}
            for stage, dtype in itertools.product(STAGES, ("fp32", "bf16")) if takes_part else ():
                engine = build(stage, dtype, seed=7)
                for s, n, _, _ in [load for load in LOADS if load[2:] == (stage, m) and _loads_as(load) == dtype]:
                    scramble(engine)
                    engine.load_checkpoint(directory / f"{s}-{n}")
                    found[s, n, stage, m] = wrong(engine)
                    losses = train(engine, 0, 2, rank)
                    if losses != expected[_dtype(s, n), dtype]:
                        found[s, n, stage, m].append(f"losses {losses} instead of {expected[_dtype(s, n), dtype]}")
                engine.destroy()
    return found


def test_any_stage_and_ranks_to_any_other(tmp_path: Path) -> None:
    results = run_ranks(_matrix, 4, str(tmp_path), timeout=280)
    assert {load for result in results for load in result} == set(LOADS)
    assert {(s, t) for s, _, t, _ in LOADS} == set(itertools.product(STAGES, STAGES))
    problems = [f"rank {r}, {load}: {bad[:3]}" for r, result in enumerate(results) for load, bad in result.items() if bad]
    assert not problems, "\n".join(problems[:20])
