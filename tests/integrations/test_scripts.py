"""A script that was written for DeepSpeed runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.script import main
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def stage0(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses: list[float] = run_ranks(main, 2, str(tmp_path_factory.mktemp("stage0")), 0)[0]["losses"]
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_a_script_for_deepspeed_runs_unchanged(stage: int, stage0: list[float], tmp_path: Path) -> None:
    results = run_ranks(main, 2, str(tmp_path), stage)
    for result in results:
        assert result["same"]
        assert result["names"] == {
            "bf16": False, "fp16": False, "world": 2, "stage": stage, "batch": (8, 2, 2), "optimizer": "FusedAdam",
            "scheduler": "WarmupLR", "group": 2, "momentum": [(0.9, 0.999)],
        }  # fmt: skip
    assert results[0]["losses"] == pytest.approx(stage0, abs=1e-6) and stage0[-1] < stage0[0] - 0.5
    assert results[0]["exported"] == {"state_dict": True, "into_model": True, "files": True, "16bit": True}
