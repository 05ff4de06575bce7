"""Every example on tiny settings and two ranks: what it writes, what it leaves behind, and how it refuses bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.examples.launch import EXAMPLES, ROOT, kill_example, run_example, start_example

CONFIGS = sorted((EXAMPLES / "configs").glob("*.json"))
TINY = ("--max-length", 48, "--new-tokens", 4, "--eval-pairs", 5)


def write_config(path: Path, micro_batch: int, accumulation: int, **more: Any) -> Path:
    """Stage 3 with SGD, whose update is as small as the gradient: a wrong weight of a token shows in the weights."""
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
        **more,
    }
    path.write_text(json.dumps(config))
    return path


def losses(out: str) -> tuple[float, float]:
    before, after = (re.search(rf"Held-out loss {when}: ([\d.]+)", out) for when in ("before", "after"))
    assert before and after, out
    return float(before.group(1)), float(after.group(1))


def weights(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "model" / "model.safetensors"))


def test_finetuning_learns_and_leaves_a_model_that_loads(tiny_model: Path, pairs_file: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    options = ("--model", tiny_model, "--data", pairs_file, "--output", tmp_path, "--steps", 12, "--lr", 0.01, *TINY)
    out = run_example("finetune_causal_lm.py", "--config", EXAMPLES / "configs" / "zero3.json", *options, fresh=True)
    before, after = losses(out)
    assert after < 0.9 * before, out
    memory = re.search(r"Memory of rank 0 in MiB: (.*)", out)
    assert memory and all(kind in memory.group(1) for kind in ("parameters", "gradients", "optimizer", "working")), out
    assert "Generated before:" in out and "Generated after:" in out
    assert any((tmp_path / "checkpoint").iterdir())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    original = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = tokenizer("1 red green blue one : red", return_tensors="pt").input_ids
    with torch.no_grad():
        trained, untrained = (m(input_ids=ids, labels=ids).loss for m in (model, original))
    assert trained < untrained
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_token_weighs_the_same_on_every_rank(tiny_model: Path, pairs_file: Path, tmp_path: Path) -> None:
    """Two ranks that accumulate give the weights, and the losses, of one process on the same global batches."""
    results = []
    for ranks, micro_batch, accumulation in ((1, 8, 1), (2, 4, 1), (2, 2, 2)):
        folder = tmp_path / f"{ranks}-{accumulation}"
        config = write_config(tmp_path / f"{ranks}-{accumulation}.json", micro_batch, accumulation)
        options = ("--model", tiny_model, "--data", pairs_file, "--output", folder, "--steps", 1, *TINY)
        out = run_example("finetune_causal_lm.py", "--config", config, *options, ranks=ranks)
        results.append((losses(out), weights(folder)))
    (expected_losses, expected), *others = results
    for got_losses, got in others:
        assert got_losses == pytest.approx(expected_losses, abs=1.1e-4)
        for name, tensor in expected.items():
            difference = (got[name] - tensor).abs().max()
            assert difference <= 1e-6, f"{name}: {difference}"


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tiny_model: Path, pairs_file: Path, tmp_path: Path) -> None:
    """To the last bit, also when it was interrupted in the middle of its second epoch."""
    config = write_config(tmp_path / "config.json", 8, 2, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    options = ("--config", config, "--model", tiny_model, "--data", pairs_file, *TINY)
    whole = ("--steps", 8, "--save-every", 5, "--output", tmp_path / "whole")
    run_example("finetune_causal_lm.py", *options, *whole)
    expected = weights(tmp_path / "whole")
    interrupted = tmp_path / "interrupted" / "checkpoint"
    shutil.copytree(tmp_path / "whole" / "checkpoint" / "global_step5", interrupted / "global_step5")
    out = run_example("finetune_causal_lm.py", *options, "--steps", 8, "--output", tmp_path / "rest", "--resume", interrupted.parent)
    assert "after step 5" in out
    rest = weights(tmp_path / "rest")
    assert all(expected[name].equal(rest[name]) for name in expected)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tiny_model: Path, pairs_file: Path, tmp_path: Path) -> None:
    """SIGKILL for every rank, while it trains or saves: the losses and weights are those of a run that was left alone."""
    config = write_config(tmp_path / "config.json", 4, 1, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    options = ("--config", config, "--model", tiny_model, "--data", pairs_file, "--save-every", 1, "--steps", 30, *TINY)
    expected = losses(run_example("finetune_causal_lm.py", *options, "--output", tmp_path / "whole"))
    output = tmp_path / "killed"
    latest = output / "checkpoint" / "latest"

    def some_steps_are_saved() -> bool:
        return latest.exists() and int(latest.read_text().removeprefix("global_step")) >= 4

    kill_example("finetune_causal_lm.py", *options, "--output", output, when=some_steps_are_saved)
    out = run_example("finetune_causal_lm.py", *options, "--output", output, "--resume", output)
    assert int(re.search(r"after step (\d+)", out).group(1)) >= 4  # type: ignore[union-attr]
    assert losses(out)[1] == expected[1]
    whole, rest = weights(tmp_path / "whole"), weights(output)
    assert all(whole[name].equal(rest[name]) for name in whole)


def test_resuming_a_run_that_is_over_is_refused(tiny_model: Path, pairs_file: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json", 2, 1)
    options = (
        "--config",
        config,
        "--model",
        tiny_model,
        "--data",
        pairs_file,
        "--output",
        tmp_path,
        "--steps",
        1,
        *TINY,
    )
    run_example("finetune_causal_lm.py", *options)
    for rank, end in enumerate(start_example("finetune_causal_lm.py", *options, "--resume", tmp_path)):
        assert end.code == 2 and f"rank {rank}: error: --resume" in end.err and "--steps must be larger" in end.err


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_plain_text_in_low_precision_with_recomputation(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat and the dog look at the moon and the star. " * 60)
    options = ("--model", tiny_model, "--data", text, "--dtype", dtype, "--gradient-checkpointing", "--lr", 0.01, *TINY)
    config = EXAMPLES / "configs" / "zero2.json"
    out = run_example("finetune_causal_lm.py", "--config", config, "--output", tmp_path, "--steps", 6, *options)
    before, after = losses(out)
    assert after < before
    assert {str(tensor.dtype) for tensor in weights(tmp_path).values()} <= {"torch.bfloat16", "torch.float16"}


@pytest.mark.parametrize("config", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_gpt_learns_with_every_config(config: Path) -> None:
    options = ("--steps", 30, "--layers", 1, "--width", 64, "--length", 32, "--bytes", 100_000)
    out = run_example("train_gpt.py", "--config", config, *options)
    found = re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after", out)
    assert found, out
    assert float(found.group(2)) < float(found.group(1)), out


def test_an_example_starts_under_zerorun() -> None:
    options = "--steps 2 --layers 1 --width 64 --length 32 --bytes 10000".split()
    command = [sys.executable, str(ROOT / "bin" / "zerorun"), "--nproc", "2", str(EXAMPLES / "train_gpt.py"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "after 2 steps" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--config", "none.json"), "none.json does not exist"),
        (("--width", "100"), "--width must be a multiple of 64, not 100"),
        (("--bytes", "500"), "--bytes 500: a tenth is held out"),
        (("--steps", "0"), "--steps, --layers and --length must be at least 1"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, tuple) else "",
)
def test_gpt_refuses_bad_flags_on_every_rank(flags: tuple[str, str], message: str) -> None:
    for rank, end in enumerate(start_example("train_gpt.py", *flags, timeout=60)):
        assert end.code != 0 and message in end.err.splitlines()[-1], f"rank {rank} ended with {end.code}\n{end.err}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--config": "typo.json"}, "gradient_clipping"),
        ({"--data": "broken.jsonl"}, "broken.jsonl, line 2: not JSON"),
        ({"--data": "small.jsonl"}, "3 training examples are too few: 2 ranks need 4"),
    ],
    ids=["config", "data", "count"],
)
def test_every_rank_refuses_bad_input(inputs: dict[str, Path], options: dict[str, str], message: str) -> None:
    flags = arguments(inputs, options)
    ended = start_example("finetune_causal_lm.py", *flags)
    for rank, end in enumerate(ended):
        assert end.code == 2, f"rank {rank} ended with {end.code}\n{end.out}\n{end.err}"
        lines = [line for line in end.err.splitlines() if "error:" in line]
        assert len(lines) == 1 and lines[0].startswith(f"finetune_causal_lm: rank {rank}: error:"), end.err
        assert message in lines[0]
        assert "Traceback" not in end.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--config": "none.json"}, "none.json does not exist"),
        ({"--config": "tensor.json"}, "leave out mesh.pp, mesh.cp, mesh.tp"),
        ({"--resume": "none"}, "no folder 'checkpoint'"),
        ({"--output": "single.jsonl"}, "single.jsonl: cannot be made (File exists)"),
        ({"--model": "none"}, "no such file or folder"),
        ({"--model": "."}, "not a Hugging Face folder"),
        ({"--model": "broken.jsonl"}, "neither a Hugging Face folder nor a .gguf file"),
        ({"--model": "foreign"}, "cannot be loaded as a causal language model"),
        ({"--model": "empty"}, "cannot be loaded as a causal language model"),
        ({"--model": "cut"}, "cannot be loaded as a causal language model (SafetensorError"),
        ({"--model": "wordless"}, "wordless: "),
        ({"--model": "cut.gguf"}, "cut.gguf: cannot be loaded as a causal language model"),
        ({"--model": "partial"}, "1 weights are missing in its files, the first is model.norm.weight"),
        ({"--model": "small"}, "its tokenizer has 294 tokens, its embedding only 10"),
        ({"--data": "single.jsonl"}, "no held-out example"),
        ({"--max-length": "4"}, "longer than --max-length 4"),
        ({"--max-length": "125"}, "the model reads only 128"),
    ],
    ids=lambda value: "-".join(f"{k[2:]}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(
    inputs: dict[str, Path],
    options: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As one rank of two that has not met the other: what every rank finds out alone needs no second process."""
    import finetune_causal_lm as script

    monkeypatch.setattr(script, "WORLD", 2)
    monkeypatch.setattr(script, "RANK", 1)
    assert script.main([str(flag) for flag in arguments(inputs, options)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("finetune_causal_lm: rank 1: error: ") and err.count("\n") == 1, err
    assert message in err


@pytest.mark.parametrize("flags", [("--lr", "-1"), ("--lr", "fast"), ("--steps", "0"), ("--steps", "-2"), ("--dtype", "int8")])
def test_flags_out_of_range_are_refused(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    import finetune_causal_lm as script

    with pytest.raises(SystemExit) as ended:
        script.main(["--config", "any.json", *flags])
    assert ended.value.code == 2
    assert f"argument {flags[0]}: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def inputs(tiny_model: Path, pairs_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of bad inputs, and the good value of every flag."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    line = '{"prompt": "red", "completion": "dog"}\n'
    (folder / "small.jsonl").write_text(line * 3 + '{"prompt": "blue", "completion": "cat"}\n')
    (folder / "single.jsonl").write_text(line * 9)
    write_config(folder / "good.json", 2, 1)
    write_config(folder / "typo.json", 2, 1, gradient_cliping=1.0)
    write_config(folder / "tensor.json", 2, 1, mesh={"tp": 2})
    for name in ("foreign", "empty", "cut", "wordless", "partial", "small"):
        shutil.copytree(tiny_model, folder / name)
    (folder / "foreign" / "config.json").write_text('{"model_type": "no_such_type"}')
    (folder / "empty" / "model.safetensors").unlink()
    (folder / "cut" / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:1000])
    (folder / "cut.gguf").write_bytes(b"GGUF")
    for path in (folder / "wordless").glob("tokenizer*"):
        path.unlink()
    whole = load_file(tiny_model / "model.safetensors")
    save_file({k: v for k, v in whole.items() if k != "model.norm.weight"}, folder / "partial" / "model.safetensors")
    whole["model.embed_tokens.weight"] = whole["model.embed_tokens.weight"][:10].clone()
    save_file(whole, folder / "small" / "model.safetensors")
    config = json.loads((tiny_model / "config.json").read_text())
    (folder / "small" / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    return {"--config": folder / "good.json", "--model": tiny_model, "--data": pairs_file, "--output": folder / "out"}


def arguments(inputs: dict[str, Path], options: dict[str, str]) -> list[object]:
    """The flags of a tiny run, `options` in place of the good ones; a path is relative to the folder of bad inputs."""
    paths = ("--config", "--model", "--data", "--output", "--resume")
    chosen = {name: inputs["--output"].parent / value if name in paths else value for name, value in options.items()}
    merged = {"--max-length": 48, "--new-tokens": 4, **inputs, **chosen}
    return [part for pair in merged.items() for part in pair]


@pytest.mark.parametrize("lora", [False, True])
def test_an_unmodified_trainer_script_learns_under_zero3(tiny_model: Path, pairs_file: Path, tmp_path: Path, lora: bool) -> None:
    config = EXAMPLES / "configs" / "trainer" / "zero3.json"
    command = [
        sys.executable, "-m", "zeroengine.launcher.cli", "--as-deepspeed", "--nproc", "2", str(EXAMPLES / "hf_trainer.py"),
        "--deepspeed", str(config), "--model", str(tiny_model), "--data", str(pairs_file), "--output_dir", str(tmp_path),
        "--max_steps", "30" if lora else "12", "--learning_rate", "0.1" if lora else "0.01", "--max_length", "48", "--disable_tqdm", "true",
        *(["--lora"] if lora else []),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    before, after = losses(done.stdout)
    assert after < (0.97 if lora else 0.95) * before, done.stdout  # an adapter alone changes a random model little
    assert (tmp_path / ("adapter_model.safetensors" if lora else "model.safetensors")).stat().st_size > 1000
