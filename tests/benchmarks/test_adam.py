from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import adam


@pytest.mark.ranks
def test_structure_of_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "adam.json"
    monkeypatch.setattr(adam, "SYSTEMS", ("zeroengine", "torch fused", "deepspeed", "copy"))
    arguments = ["--elements", "4000", "--tensors", "3", "--rounds", "2", "--steps", "1", "--json", str(out)]
    assert adam.main([*arguments, "--deepspeed-python", "/does/not/exist"]) == 0
    result = json.loads(out.read_text())
    assert set(result["rates"]) == {"zeroengine", "torch fused", "copy"}
    assert "deepspeed" in result["skipped"]
    for row in result["summary"].values():
        assert row["gigabytes_per_second"] > 0
        assert set(row["ratio"]) == {"torch fused", "copy"}
    assert result["summary"]["torch fused"]["ratio"]["torch fused"]["median"] == 1.0
    printed = capsys.readouterr().out
    assert "zeroengine" in printed and "deepspeed: not measured" in printed


def test_rounds_are_compared_with_themselves() -> None:
    rates = {"zeroengine": [2e9, 20e9, 4e9], "torch fused": [1e9, 10e9, 4e9]}
    rows = adam.summary({"rates": rates})
    assert rows["zeroengine"]["ratio"]["torch fused"]["median"] == 2.0
    assert "copy" not in rows["zeroengine"]["ratio"]
    assert "2.00" in adam.render(rows, {})


def test_a_plot_needs_matplotlib_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    rows = {"zeroengine": {"gigabytes_per_second": 1.0, "ratio": {}}}
    assert adam.plot(rows, tmp_path / "adam.png") is False and not list(tmp_path.iterdir())
