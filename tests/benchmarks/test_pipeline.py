from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import pipeline

SHAPE = ["--hidden", "16", "--layers", "4", "--vocab", "32", "--sequence", "8", "--micro-batch", "1", "--accumulation", "4"]


def test_a_tiny_run_measures_idle_time_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Systems whose stages are cut alike train alike."""
    out = tmp_path / "figures.json"
    systems = ["torch-1f1b", "zeroengine-zb-v"]
    idle = ["--stages", "2", "--micro-batches", "2,3", "--schedules", "1f1b,interleaved,dualpipe-v", "--sleep", "0.002"]
    code = pipeline.main([*SHAPE, *idle, "--systems", ",".join(systems), "--rounds", "2", "--steps", "1", "--json", str(out)])
    told = capsys.readouterr().out
    assert code == 0, told
    found = json.loads(out.read_text())
    assert list(found["systems"]) == systems and not found["missing"]
    losses = [found["systems"][name]["loss"] for name in systems]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-4)
    assert all(len(found["systems"][name]["round_seconds"]) == 2 for name in systems)
    assert 0 <= found["systems"]["zeroengine-zb-v"]["idle_computed"] <= found["systems"]["zeroengine-zb-v"]["idle"] < 1
    assert [(r["schedule"], r["micro_batches"]) for r in found["idle"]] == [("1f1b", 2), ("interleaved", 2), ("1f1b", 3)]
    assert found["idle"][0]["computed"] == pytest.approx(1 / 3) and found["idle"][2]["computed"] == pytest.approx(1 / 4)
    assert found["idle"][1]["computed"] == pytest.approx(1 / 5)
    assert "idle computed" in told and "zeroengine-zb-v" in told


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in ((["--systems", "megatron"], "megatron"), (["--layers", "6"], "6"), (["--schedules", "1b1f"], "1b1f")):
        with pytest.raises(SystemExit):
            pipeline.main(arguments)
        assert named in capsys.readouterr().err
