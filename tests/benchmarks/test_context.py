"""`python -m benchmarks.context` on a tiny model: every system is measured, and memory and balance are what they must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.context import main, summarize

pytestmark = pytest.mark.ranks


def test_ratios_and_balance() -> None:
    each = {"pairs": [10, 30], "kept": [7, 8]}
    rows = summarize({"zigzag": {"seconds": [1.0, 2.0], **each}, "ulysses": {"seconds": [2.0, 4.0], **each}})
    assert rows["ulysses"]["over_zigzag"]["median"] == 2.0 and rows["zigzag"]["over_zigzag"]["median"] == 1.0
    assert rows["zigzag"]["imbalance"] == 1.5 and rows["zigzag"]["kept"] == 8


def test_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "context.json"
    small = ["--tokens", "256", "--width", "32", "--heads", "4", "--key-heads", "2", "--layers", "1", "--rounds", "1"]
    assert main(["--ranks", "1,2", *small, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    for system in ("zigzag", "contiguous", "ulysses"):
        one, two = results["1"][system], results["2"][system]
        assert one["seconds"] > 0 and two["seconds"] > 0
        # activations of half the tokens
        assert 0.45 * one["kept"] < two["kept"] < 0.6 * one["kept"]
    assert results["2"]["zigzag"]["imbalance"] <= 1.01 < 1.4 < results["2"]["contiguous"]["imbalance"]
    assert "÷ zigzag" in capsys.readouterr().out
