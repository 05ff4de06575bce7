from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import compare
from benchmarks.model import build_model, count_parameters, step_batches
from benchmarks.settings import Settings

_TINY = ["--hidden", "32", "--layers", "2", "--vocab", "61", "--sequence", "16", "--rounds", "2", "--steps", "1"]
_TORCH_SYSTEMS = ["limit", "ddp", "fsdp2"]
_STAGES = ["zeroengine-0", "zeroengine-1", "zeroengine-2", "zeroengine-3"]


def _tiny_run(tmp_path: Path, *more: str) -> dict[str, dict]:
    out = tmp_path / "out" / "figures.json"
    assert compare.main([*_TINY, "--warmup", "1", "--timeout", "300", "--json", str(out), *more]) == 0
    result: dict[str, dict] = json.loads(out.read_text())
    return result


def test_default_model_has_63_million_parameters_and_the_formula_counts_them() -> None:
    assert Settings().parameters == 63_094_272
    tiny = Settings(hidden=32, layers=2, vocab=61, sequence=16)
    assert count_parameters(build_model(tiny)) == tiny.parameters


def test_same_weights_and_data_everywhere_and_other_data_on_other_ranks() -> None:
    tiny = Settings(hidden=32, layers=1, vocab=61, sequence=16, accumulation=3)
    first, second = build_model(tiny), build_model(tiny)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.head.weight is first.tokens.weight
    batches = step_batches(tiny, 4, 1)
    assert len(batches) == 3 and batches[0][0].shape == (2, 16)
    assert torch.equal(batches[0][0][:, 1:], batches[0][1][:, :-1])
    assert torch.equal(batches[2][0], step_batches(tiny, 4, 1)[2][0])
    assert not torch.equal(batches[0][0], step_batches(tiny, 4, 0)[0][0])
    assert not torch.equal(batches[0][0], step_batches(tiny, 5, 1)[0][0])


def _check_figures(result: dict[str, dict], names: list[str]) -> None:
    assert list(result["systems"]) == names
    assert not result["failed"]
    for name, figures in result["systems"].items():
        assert figures["parameters"] == Settings(hidden=32, layers=2, vocab=61, sequence=16).parameters
        assert len(figures["raw"]["step_seconds"]) == 2 and len(figures["raw"]["losses"]) == 3
        assert all(math.isfinite(loss) for loss in figures["raw"]["losses"])
        assert figures["over_limit"]["low"] <= figures["over_limit"]["median"] <= figures["over_limit"]["high"]
        assert figures["resident_bytes_per_parameter"] > 0
        assert figures["peak_bytes_per_parameter"] > 0
        if name != "limit":  # without communication ranks drift apart after the first update
            assert figures["loss_difference"] < 1e-5
        assert figures["first_loss"] == pytest.approx(result["systems"]["ddp"]["first_loss"], rel=1e-5)
    assert result["systems"]["limit"]["last_loss"] != result["systems"]["ddp"]["last_loss"]


def test_figures_of_the_torch_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _tiny_run(tmp_path, "--systems", "ddp,fsdp2", "--accumulation", "2")
    _check_figures(result, _TORCH_SYSTEMS)
    shown = capsys.readouterr().out
    assert all(any(line.startswith(name + " ") for line in shown.splitlines()) for name in _TORCH_SYSTEMS)


def test_figures_of_every_zeroengine_stage(tmp_path: Path) -> None:
    result = _tiny_run(tmp_path, "--systems", "ddp,zeroengine")
    _check_figures(result, ["limit", "ddp", *_STAGES])
    for name in _STAGES:
        figures = result["systems"][name]
        # buckets are padded, and stage 3 may gather the tied embedding once more; never less than the formula
        assert 1.0 <= figures["sent_bytes"] / figures["sent_formula_bytes"] < 1.25
        assert figures["raw"]["report"]["memory"]


def test_bf16(tmp_path: Path) -> None:
    systems = _tiny_run(tmp_path, "--systems", "ddp,fsdp2", "--dtype", "bf16")["systems"]
    assert systems["fsdp2"]["loss_difference"] < 0.05
    tiny = Settings(hidden=32, layers=2, vocab=61, sequence=16)
    model = build_model(tiny)
    fp32 = sum(model(*step_batches(tiny, 0, rank)[0]).item() for rank in range(2)) / 2
    for name in _TORCH_SYSTEMS:
        assert systems[name]["first_loss"] == pytest.approx(fp32, rel=1e-2)
        assert abs(systems[name]["first_loss"] - fp32) > 1e-6 * fp32


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed, so nothing is left out")
def test_missing_deepspeed_is_one_line_and_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _tiny_run(tmp_path, "--systems", "deepspeed-1")
    assert list(result["systems"]) == ["limit"]
    assert list(result["skipped"]) == ["deepspeed-1"]
    assert "deepspeed-1 left out: DeepSpeed is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "dpp"], "unknown system 'dpp'; known: limit, ddp"),
        (["--rounds", "0"], "'0' is not a whole number above 0"),
        (["--steps", "x"], "'x' is not a whole number above 0"),
        (["--hidden", "200"], "hidden is 200; it must be a multiple of 64, or less than 128"),
        (["--deepspeed-python", "/nowhere/python"], "/nowhere/python: no such program"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_plot_without_matplotlib_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--plot", str(tmp_path / "out.png")])
    assert "pip install matplotlib" in capsys.readouterr().err
