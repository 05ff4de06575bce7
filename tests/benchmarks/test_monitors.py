from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import monitors


@pytest.mark.ranks
def test_structure_of_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    code = monitors.main([
        "--stages", "1", "--hidden", "16", "--layers", "1", "--vocab", "32", "--sequence", "8", "--rounds", "2", "--steps", "2",
        "--warmup", "1", "--json", str(out),
    ])  # fmt: skip
    assert code == 0
    result = json.loads(out.read_text())
    assert {"StepClock", "Progress", "Monitors", "CommsLogger", "Recorder"} <= set(result["observers"])
    figures = result["stages"]["1"]
    assert all(len(figures["raw"][mode]) == 2 and figures[mode] > 0 for mode in ("bare", "off", "on"))
    assert figures["on_over_off"]["low"] <= figures["on_over_off"]["median"] <= figures["on_over_off"]["high"]
    assert "on cost %" in capsys.readouterr().out


def test_costs_are_of_one_round() -> None:
    summary = monitors.summarize({"bare": [1.0, 10.0], "off": [1.0, 10.0], "on": [1.5, 15.0]})
    assert summary["off_over_bare"]["median"] == 1.0 and summary["on_over_off"]["median"] == 1.5


@pytest.mark.parametrize("stages", ["4", "0,7", "x", ""])
def test_unknown_stages_are_refused(stages: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        monitors.main(["--stages", stages])
    assert ended.value.code == 2
    assert "stages" in capsys.readouterr().err
