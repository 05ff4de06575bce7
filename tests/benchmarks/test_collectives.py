"""`python -m benchmarks.collectives` on tiny tensors: it measures every system, and its ratios are those of its times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.collectives import main, summarize
from benchmarks.moving import least_bytes

pytestmark = pytest.mark.ranks


def test_ratios() -> None:
    result = summarize({"shared": [1.0, 2.0], "staged": [2.0, 4.0], "gloo": [20.0, 40.0], "memcpy": [0.5, 1.0], "limit": [0.8, 1.6]})
    assert result["gloo_over_shared"]["median"] == 20 and result["gloo_over_staged"]["median"] == 10
    assert result["gloo_over_limit"]["median"] == 25 and result["shared_over_limit"]["median"] == 1.25
    assert result["shared_over_memcpy"]["median"] == 2 and result["seconds"]["gloo"] == 30


def test_least_bytes_are_those_of_the_formulas() -> None:
    assert [least_bytes(operation, 120, 3, 1) for operation in ("all_gather", "reduce_scatter", "all_reduce")] == [240, 160, 320]
    assert [least_bytes("broadcast", 120, 3, rank) for rank in range(3)] == [0, 240, 240]


def test_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "collectives.json"
    assert main(["--ranks", "2", "--mib", "1", "--rounds", "1", "--repeats", "1", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert [r["operation"] for r in results] == ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "message"]
    assert all(seconds > 0 for r in results for seconds in r["seconds"].values())
    assert "gloo ÷ shared" in capsys.readouterr().out
