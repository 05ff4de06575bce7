"""The benchmark of checkpoints runs, and its table says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkpoint


def test_medians_of_the_slowest_rank() -> None:
    def rank(save: list[float]) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
        times = {name: {"save": save, "blocked": [s / 2 for s in save], "load": [1.0] * 3} for name in checkpoint.SYSTEMS}
        return times, dict.fromkeys(checkpoint.SYSTEMS, 10)

    rows = checkpoint.summary(8 * 10**6, [rank([1.0, 4.0, 2.0]), rank([3.0, 1.0, 2.0])])
    assert [row["system"] for row in rows] == list(checkpoint.SYSTEMS)
    assert rows[0]["save_s"] == 3.0 and rows[0]["blocked_s"] == 1.5  # of 3, 4, 2 and of half of them
    assert rows[0]["save_mb_s"] == pytest.approx(8 / 3) and rows[0]["load_mb_s"] == 8.0
    export = {"export_s": 2.0, "extra_bytes": 3e6, "largest_tensor_bytes": 2e6}
    told = checkpoint.text(rows, 2, export)
    assert "100.0%" in told and "export by one process: 4 MB/s, extra memory 1.50 of the largest tensor (2.0 MB)" in told


@pytest.mark.ranks
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "times.json"
    arguments = ["--megabytes", "1", "--ranks", "2", "--rounds", "1", "--folder", str(tmp_path), "--json", str(out)]
    assert checkpoint.main(arguments) == 0
    found = json.loads(out.read_text())
    rows = found["systems"]
    assert all(row["save_s"] > 0 and row["load_s"] > 0 and len(row["rounds"]["save"]) == 1 for row in rows)
    assert rows[3]["blocked_s"] < rows[3]["save_s"]
    assert capsys.readouterr().out.count("\n") == 6
    assert found["export"]["export_s"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
