from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import moe


def test_a_tiny_run_measures_both_forms_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    shape = ["--hidden", "16", "--intermediate", "24", "--experts", "4", "--tokens", "32", "--layers", "1"]
    code = moe.main([*shape, "--systems", "zeroengine,zeroengine-list", "--rounds", "2", "--steps", "1", "--json", str(out)])
    assert code == 0
    figures = json.loads(out.read_text())["systems"]
    assert set(figures) == {"zeroengine", "zeroengine-list"}
    for system in figures.values():
        assert len(system["round_seconds"]) == 2 and all(p > 0 for p in system["planned"]) and system["loss"] > 0
    assert "zeroengine-list" in capsys.readouterr().out


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        moe.main(["--systems", "megatron"])
    assert "megatron" in capsys.readouterr().err
