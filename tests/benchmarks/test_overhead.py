from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import overhead


def test_structure_of_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    code = overhead.main([
        "--stages", "0,3", "--large", "64", "--layers", "3", "--width", "8", "--startups", "2", "--rounds", "2",
        "--steps", "2", "--warmup", "1", "--timeout", "300", "--json", str(out),
    ])  # fmt: skip
    assert code == 0
    result = json.loads(out.read_text())
    assert list(result["stages"]) == ["0", "3"]
    for figures in result["stages"].values():
        assert figures["finite"]
        for world in ("small", "large"):
            assert len(figures["raw"][world]["startup"]) == 2
            assert len(figures["raw"][world]["step"]) == 2
            assert figures[f"startup_{world}"] > 0 and figures[f"step_{world}"] > 0
        assert figures["step_ratio"]["low"] <= figures["step_ratio"]["median"] <= figures["step_ratio"]["high"]
    assert "64 ranks" in capsys.readouterr().out


def test_ratio_is_large_to_small_round_by_round() -> None:
    times = {
        overhead.Key(1, 2): overhead.Times([1.0, 1.0], [1.0, 10.0]),
        overhead.Key(1, 1024): overhead.Times([3.0, 3.0], [2.0, 20.0]),
        overhead.Key(None, 1): overhead.Times([], [0.5, 5.0]),
    }
    summary = overhead.summarize(times, [1], 2, 1024)["1"]
    assert summary["startup_ratio"]["median"] == 3.0
    assert summary["step_ratio"]["median"] == 2.0
    assert summary["step_over_plain"]["median"] == 2.0


@pytest.mark.parametrize("stages", ["4", "0,7", "x", ""])
def test_unknown_stages_are_refused(stages: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        overhead.main(["--stages", stages])
    assert ended.value.code == 2
    assert "stages" in capsys.readouterr().err
