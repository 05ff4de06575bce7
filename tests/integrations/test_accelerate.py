"""`accelerate launch --use_deepspeed` and the native Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.launch import run_example
from tests.integrations.jobs import native_cases
from tests.integrations.tiny import close, pretrained
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "integrations" / "accelerate_script.py"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("model"))


OPTIONS = (
    "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--use_deepspeed",
    "--zero_stage", "3", "--zero3_init_flag", "true", "--zero3_save_16bit_model", "true", "--gradient_accumulation_steps", "2",
    "--gradient_clipping", "1.0",
)  # fmt: skip


def result(out: Path) -> dict[str, Any]:
    """What the script wrote."""
    read: dict[str, Any] = json.loads((out / "result.json").read_text())
    return read


@pytest.mark.ranks
def test_accelerate_launch_with_deepspeed_is_the_engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ("-m", "zeroengine.launcher.cli", "as-deepspeed", "accelerate", "launch", "--main_process_port", str(free_port()))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, *launcher, *OPTIONS, str(SCRIPT), str(folder), str(tmp_path / "zero3")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    run_example(str(SCRIPT), folder, tmp_path / "plain")
    plain, got = result(tmp_path / "plain"), result(tmp_path / "zero3")
    assert got["stage"] == 3 and plain["stage"] is None and got["world"] == plain["world"] == 2
    assert close(got["losses"], plain["losses"]), (got["losses"], plain["losses"])
    assert close(got["norms"], plain["norms"], 1e-4) and close(got["rates"], plain["rates"], 1e-12)
    from safetensors.torch import load_file

    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "zero3"))
    assert one.keys() == other.keys() and all(torch.allclose(one[k], other[k], atol=1e-4) for k in one)


def test_the_native_trainer_does_the_same_without_the_stand_in(folder: Path, tmp_path: Path) -> None:
    results = run_ranks(native_cases, 2, str(folder), str(tmp_path), [0, 2, 3], timeout=200)
    for rank, (plain, *engines) in enumerate(results):
        for got in engines:
            if rank == 0:
                assert close(got["train"], plain["train"]), (got["train"], plain["train"])
                assert close(got["norms"], plain["norms"], 1e-4)
                assert close(got["saved"], got["logits"], 1e-5)
                assert got["resumed"] == got["train"]
            assert close([got["eval"]], [plain["eval"]]) and close(got["logits"], plain["logits"], 1e-4)
            assert got["generated"] == plain["generated"]
            assert got["best"] == pytest.approx(min(got["evals"]), abs=1e-6)
            assert "gradient_clipping" in got["refused"]
