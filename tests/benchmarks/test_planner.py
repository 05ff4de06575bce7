"""`benchmarks.planner`: its figures, and one configuration from the plan to the measurement."""

from __future__ import annotations

import json
import statistics
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


def test_one_disturbed_moment_does_not_swap_rows() -> None:
    """The second configuration is slow in the middle round only, the slower rank counts, and every round begins with another one."""
    cases, ran = planner.CASES[:3], []

    def train(case: planner.Case) -> planner.Answers:
        ran.append(case.name)
        disturbed = 100.0 if (case, len(ran)) == (cases[1], 4) else 1.0
        slow = [disturbed * (cases.index(case) + 1)] * 3
        return [{"seconds": [0.1, 0.1, 0.1], "turn": len(ran)}, {"seconds": slow}]

    found = planner.in_rounds(cases, 3, train)
    names = [case.name for case in cases]
    assert ran == [*names, names[1], names[2], names[0], names[2], *names[:2]]
    assert found[names[1]][0] == [2.0, 200.0, 2.0] and found[names[1]][1][0]["turn"] == 9
    assert [statistics.median(found[name][0]) for name in names] == [1.0, 2.0, 3.0]


def test_a_configuration_is_planned_and_measured(tmp_path: Path) -> None:
    machine, out = tmp_path / "machine.json", tmp_path / "out.json"
    machine.write_text(json.dumps({**vars(PRESETS["a100-80g"]), "device": "cpu"}))
    small = ["--layers", "2", "--hidden", "32", "--sequence", "16", "--steps", "1", "--rounds", "1"]
    assert planner.main([*small, "--cases", "2", "--hardware", str(machine), "--json", str(out), "--folder", str(tmp_path)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["bytes_equal"], case["differences"]
    assert case["memory_error"] <= 0.03
    assert case["rounds"] == [case["seconds"]] and case["seconds"] > 0
