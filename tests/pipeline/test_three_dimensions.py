"""Stages, shared layers, and data parallelism or shared sequences at once, on eight ranks."""

from __future__ import annotations

from typing import Any

import pytest

import zeroengine
from tests.pipeline.listed import Result, compare, listed, reference, run, settings
from tests.ranks import run_ranks

CASES: dict[str, tuple[dict[str, Any], int]] = {  # with the number of data-parallel groups
    "pp2 tp2 dp2": ({"mesh": {"pp": 2, "tp": 2}, "tensor_parallel": {"sequence_parallel": True}}, 2),
    "pp2 tp2 cp2": ({"mesh": {"pp": 2, "tp": 2, "cp": 2}, "sequence_parallel": {"attention": "ring"}}, 1),
    "pp2 cp2 dp2": ({"mesh": {"pp": 2, "cp": 2}}, 2),
}


def _train(rank: int, world: int) -> dict[str, Result]:
    zeroengine.init_distributed(verbose=False)
    found = {}
    for label, (more, _) in CASES.items():
        engine, *_ = zeroengine.initialize(model=listed(2), config=settings(2 if "dp2" in label else 1, **more))
        found[label] = run(engine, "list")
    return found


@pytest.fixture(scope="module")
def eight() -> list[dict[str, Result]]:
    return run_ranks(_train, 8, timeout=200)


@pytest.mark.parametrize("label", CASES)
def test_three_dimensions_follow_one_process(eight: list[dict[str, Result]], label: str) -> None:
    model = listed(1)
    compare([found[label] for found in eight], reference(model, CASES[label][1], model))
