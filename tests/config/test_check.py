"""`zerorun config check`: the class and the effective value of each key, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroengine.launcher.cli import main

ACCEPTED = {
    "train_batch_size": "8", "bf16": {"enabled": "true"}, "_note": "ours",
    "zero_optimization": {"stage": 2.0, "cpu_offload": True, "contiguous_gradients": False, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "adamw", "params": {"lr": "auto", "use_triton": True, "amsgrad": True}},
}  # fmt: skip


def _check(tmp_path: Path, values: dict[str, Any] | str, *more: str) -> list[str]:
    file = tmp_path / "ds.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return ["config", "check", str(file), *more]


def _said(out: str, path: str) -> str:
    found = [line for line in out.splitlines() if line.split()[1:2] == [path]]
    assert len(found) == 1, (path, out)
    return " ".join(found[0].split())


def test_what_each_key_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_check(tmp_path, ACCEPTED, "--fact", "lr=3e-4", "--world", "4")) == 0
    out = capsys.readouterr().out
    assert _said(out, "train_batch_size").startswith('honoured train_batch_size "8" -> 8 Samples a step')
    assert _said(out, "zero_optimization.stage").startswith("honoured zero_optimization.stage 2.0 -> 2 ")
    assert '-> "cpu"' in _said(out, "zero_optimization.cpu_offload")
    assert _said(out, "zero_optimization.contiguous_gradients").startswith("harmless")
    assert _said(out, "optimizer.params.lr").startswith('honoured optimizer.params.lr "auto" -> 0.0003')
    assert _said(out, "optimizer.params.use_triton").startswith("harmless")
    assert _said(out, "optimizer.params.amsgrad").startswith("honoured")
    assert _said(out, "_note").startswith("comment")
    assert "4 ranks: train_batch_size 8 = train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 1 x 4" in out
    assert out.endswith("ds.json: accepted\n")


@pytest.mark.parametrize(
    ("change", "more", "expected"),
    [
        ({"zero_optimization": {"zero_quantized_weights": True}}, (), "REFUSED zero_optimization.zero_quantized_weights"),
        ({"num-layers": 2}, (), "UNKNOWN num-layers 2 is not a key; it is a setting of a model"),
        ({"gradient_clipping": "auto"}, (), 'AUTO gradient_clipping "auto" is "auto", and nothing tells the value'),
        ({"train_batch_size": "lots"}, (), 'INVALID train_batch_size "lots" has the value "lots": expected an integer'),
        ({"train_batch_size": 8}, ("--world", "3"), "REFUSED train_batch_size 8 / (gradient_accumulation_steps 1 × 3"),
        ({"mesh": {"tp": 2}, "train_batch_size": 8}, ("--world", "3"), "REFUSED 3 ranks cannot be divided by mesh.pp 1"),
        ("{train_batch_size: 8}\n```", (), "line 2, column 1: unexpected text after the end of the object"),
    ],
)
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any] | str, more: tuple[str, ...], expected: str
) -> None:
    assert main(_check(tmp_path, change, *more)) == 1
    out = capsys.readouterr().out
    assert expected in " ".join(out.split()) and out.endswith("ds.json: refused\n")


def test_a_difference_to_deepspeed_is_told_where_it_applies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adam = {"type": "Adam", "params": {"weight_decay": 0.1}}
    main(_check(tmp_path, {"train_batch_size": 8, "optimizer": adam}))
    out = capsys.readouterr().out
    assert "  gradient_clipping: gradients are not clipped" in out and "optimizer.params.adam_w_mode:" in out
    assert "communication_data_type" not in out  # fp32 is fp32 there too
    adam["params"]["adam_w_mode"] = True  # type: ignore[index]
    main(_check(tmp_path, {"train_batch_size": 8, "gradient_clipping": 0, "optimizer": adam}))
    assert "DeepSpeed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [["config"], ["config", "check"], ["config", "check", "f", "--world", "0"], ["config", "check", "f", "--fact", "lr"]]
)
def test_a_wrong_command_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "config" in capsys.readouterr().err


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(tmp_path / "none.json")]) == 1
    assert "does not exist" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["config", "--help"], ["config", "check", "FILE"]])
def test_it_starts_without_torch(tmp_path: Path, argv: list[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ACCEPTED))
    argv = [str(file) if word == "FILE" else word for word in argv]
    code = f"import sys\nfrom zeroengine.launcher.cli import main\ntry:\n    main({argv!r})\nexcept SystemExit:\n    pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
