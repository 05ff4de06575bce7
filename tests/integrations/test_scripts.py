"""A script that was written for DeepSpeed runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.script import main
from tests.ranks import run_ranks


def test_a_script_for_deepspeed_runs_unchanged(tmp_path: Path) -> None:
    stages = [0, 2, 3]
    results = run_ranks(main, 2, str(tmp_path), stages, server="stand_in")
    for rank, of_rank in enumerate(results):
        for stage, result in zip(stages, of_rank, strict=True):
            assert result["same"]
            assert result["names"] == {
                "bf16": False, "fp16": False, "world": 2, "stage": stage, "batch": (8, 2, 2), "optimizer": "FusedAdam",
                "scheduler": "WarmupLR", "group": 2, "momentum": [(0.9, 0.999)],
            }  # fmt: skip
            assert result["losses"] == pytest.approx(of_rank[0]["losses"], abs=1e-6)
            if rank == 0:
                assert result["exported"] == {"state_dict": True, "into_model": True, "files": True, "16bit": True}
    losses = results[0][0]["losses"]
    assert losses[-1] < losses[0] - 0.5
