"""`benchmarks.planner`: its figures, and one configuration from the plan to the measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planner
from zeroengine.planner.hardware import PRESETS


def test_kendall() -> None:
    assert planner.kendall([1, 2, 3], [10, 20, 30]) == 1
    assert planner.kendall([1, 2, 3], [30, 20, 10]) == -1
    assert planner.kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


def test_cases_are_twelve_on_two_and_four_ranks() -> None:
    assert len(planner.CASES) == 12
    assert {case.ranks for case in planner.CASES} == {2, 4}


def test_a_configuration_is_planned_and_measured(tmp_path: Path) -> None:
    machine, out = tmp_path / "machine.json", tmp_path / "out.json"
    machine.write_text(json.dumps({**vars(PRESETS["a100-80g"]), "device": "cpu"}))
    small = ["--layers", "2", "--hidden", "32", "--sequence", "16", "--steps", "1"]
    assert planner.main([*small, "--cases", "2", "--hardware", str(machine), "--json", str(out), "--folder", str(tmp_path)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["bytes_equal"], case["differences"]
    assert case["memory_error"] <= 0.03
    assert case["seconds"] > 0
