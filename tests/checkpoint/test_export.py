"""Weights out: from a running engine and from a checkpoint, in both formats, whole, with ties, read by others' loaders."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor

from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from tests.checkpoint.common import ALONE
from tests.checkpoint.engines import Awkward, build, train
from tests.ranks import run_ranks
from zeroengine.checkpoint import Entry, ModelFolder, SavedCheckpoint, export_weights, save
from zeroengine.checkpoint.commands import describe, export, inspect
from zeroengine.errors import CheckpointError
from zeroengine.integrations.standin.consolidate import convert_zero_checkpoint_to_fp32_state_dict
from zeroengine.launcher.cli import main
from zeroengine.zero.layout import Piece

TINY_LLAMA = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip


def _train_and_save(rank: int, world: int, folder: str) -> dict[str, Tensor] | None:
    d = Path(folder)
    engine = build(3, "bf16")
    train(engine, 0, 2, rank)
    engine.save_checkpoint(d / "run", client_state={"epoch": 1})
    engine.save_16bit_model(d / "live", "w.bin")
    engine.save_16bit_model(d / "live", "w.safetensors")
    engine.save_pretrained(d / "live" / "sharded", max_shard_size="3KB", dtype=torch.float32)
    (d / "file").touch()
    try:
        engine.save_16bit_model(d / "file", "w.bin")
        told = ""
    except CheckpointError as error:
        told = str(error)
    if "failed on rank 0" not in told:
        raise AssertionError(told)
    train(engine, 2, 1, rank)
    engine.load_checkpoint(d / "run")
    full = engine.full_state_dict()
    masters = [(p.name, p.start, p.data.tolist()) for m in engine.optimizer.masters for _, p in m.pieces()]
    return {**(full or {}), "masters": masters}  # type: ignore[dict-item]


def _hugging_face(rank: int, world: int, folder: str) -> dict[str, Tensor] | None:
    import transformers

    import zeroengine

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY_LLAMA, tie_word_embeddings=True)
    engine, *_ = zeroengine.initialize(
        model=transformers.LlamaForCausalLM(config),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "steps_per_print": None},
    )  # fmt: skip
    ids = torch.randint(0, 32, (1, 8))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(Path(folder) / "hf")
    engine.save_pretrained(Path(folder) / "hf-live", max_shard_size="2KB")
    return engine.full_state_dict()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """A folder with a run; its weights as used; its masters."""
    folder = tmp_path_factory.mktemp("export")
    results = run_ranks(_train_and_save, 2, str(folder), timeout=100)
    weights = results[0]
    shapes = {name: value.shape for name, value in weights.items() if isinstance(value, Tensor)}
    flat = {name: torch.zeros(shape.numel()) for name, shape in shapes.items()}
    for result in results:
        for name, start, values in result.pop("masters"):
            flat[name][start : start + len(values)] = torch.tensor(values)
    masters = {name: flat[name].view(shape) for name, shape in shapes.items()}
    masters["head.weight"] = masters["emb.weight"]
    for name in ("frozen.weight", "turned"):
        masters[name] = weights[name].float()
    masters["seen"] = weights["seen"]
    return folder, weights, masters


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[n], expected[n]) and found[n].dtype is expected[n].dtype for n in found
    )


def test_weights_of_a_running_engine(run: Any) -> None:
    folder, weights, _ = run
    found = torch.load(folder / "live" / "w.bin", weights_only=True)
    assert _same(found, weights)
    assert found["head.weight"].data_ptr() == found["emb.weight"].data_ptr()
    assert _same(load_file(folder / "live" / "w.safetensors"), weights)
    index = json.loads((folder / "live" / "sharded" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    merged = {n: t for name in files for n, t in load_file(folder / "live" / "sharded" / name).items()}
    assert merged.keys() == index["weight_map"].keys() == weights.keys()
    assert all(torch.equal(merged[n], weights[n].to(merged[n].dtype)) for n in merged)
    Awkward().load_state_dict(merged)


@pytest.mark.parametrize("dtype", ["as-used", "fp32", "fp16"])
@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("size", ["5GB", "2KB"])
def test_weights_of_a_checkpoint(run: Any, tmp_path: Path, format: str, dtype: str, size: str) -> None:
    folder, weights, masters = run
    out = tmp_path / "out"
    assert main(["export", str(folder / "run"), str(out), "--format", format, "--dtype", dtype, "--max-shard-size", size]) == 0
    read = load_file if format == "safetensors" else lambda p: torch.load(p, weights_only=True)
    found = {n: t for p in sorted(out.iterdir()) if p.suffix != ".json" for n, t in read(p).items()}
    expected = weights if dtype == "as-used" else masters
    if dtype == "fp16":
        expected = {n: t.half() if t.is_floating_point() else t for n, t in expected.items()}
    assert _same(found, expected)
    assert (len(list(out.iterdir())) > 2) == (size == "2KB")
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_a_torch_file_is_a_right_archive(run: Any, tmp_path: Path) -> None:
    export_weights(SavedCheckpoint(run[0] / "run"), tmp_path, format="torch")
    assert zipfile.ZipFile(tmp_path / "pytorch_model.bin").testzip() is None


def test_hugging_face_loads_both(tmp_path: Path) -> None:
    import transformers

    weights = run_ranks(_hugging_face, 2, str(tmp_path), timeout=100)[0]
    assert export([str(tmp_path / "hf"), str(tmp_path / "hf-out"), "--max-shard-size", "2KB"]) == 0
    for name in ("hf-out", "hf-live"):
        model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert model.dtype is torch.bfloat16
        assert _same(model.state_dict(), weights)
        assert "lm_head.weight" not in json.loads((tmp_path / name / "model.safetensors.index.json").read_text())["weight_map"]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf-out").config.architectures == ["LlamaForCausalLM"]
    assert export([str(tmp_path / "hf"), str(tmp_path / "hf-out")]) == 0  # again, in one file: nothing of before is left
    assert sorted(p.name for p in (tmp_path / "hf-out").glob("model*")) == ["model.safetensors"]


def test_ties_in_the_header(tmp_path: Path) -> None:
    entries = [Entry("emb.weight", (11, 17), torch.float32)]
    out = ModelFolder(tmp_path, entries, {"head.weight": "emb.weight"}, files={"config.json": "{}"})
    out.put("emb.weight", torch.ones(11, 17))
    out.close()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "emb.weight"}
    model = Awkward()
    load_model(model, tmp_path / "model.safetensors", strict=False)
    assert bool((model.head.weight == 1).all())


def test_an_export_that_fails_leaves_nothing_and_says_why(run: Any, tmp_path: Path) -> None:
    saved = SavedCheckpoint(run[0] / "run")
    data = next(saved.folder.glob("*.distcp"))
    (tmp_path / "copy").mkdir()
    for p in saved.folder.iterdir():
        content = p.read_bytes()
        damage = content[:2000] + b"\0" * (len(content) - 2000)
        (tmp_path / "copy" / p.name).write_bytes(damage if p.name == data.name else content)
    damaged = SavedCheckpoint(tmp_path / "copy")
    with pytest.raises(Exception):  # noqa: B017, whatever torch says of such a file
        export_weights(damaged, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert main(["inspect", str(tmp_path / "copy"), "--verify"]) == 1
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    with pytest.raises(CheckpointError, match="is not a size"):
        export([str(run[0] / "run"), str(tmp_path), "--max-shard-size", "many"])


def test_inspect(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, weights, _ = run
    assert inspect([str(folder / "run"), "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["global_steps"] == 2 and facts["ranks"] == 2
    assert facts["optimizer"] == "FusedAdam" and facts["client_state"] == ["epoch"]
    assert facts["tied"] == {"head.weight": "emb.weight"} and facts["damaged_files"] == facts["non_finite"] == []
    assert facts["tensors"]["model.row"] == {"shape": [1, 17], "dtype": "bfloat16", "bytes": 34}
    assert facts["elements"] == sum(w.numel() for n, w in weights.items() if n != "head.weight")
    assert facts["files"][".metadata"]["bytes"] > 0
    assert inspect([str(folder / "run"), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "optim.emb.weight.exp_avg  (11, 17) float32 748 bytes" in text and "steps      2 (0 skipped)" in text


def test_inspect_names_values_that_are_not_finite(tmp_path: Path) -> None:
    piece = Piece("w", torch.Size((3,)), 0, torch.tensor([1.0, float("nan"), 2.0]))
    save(tmp_path / "a", {"model.w": [piece]}, {}, {}, **ALONE)
    assert describe(SavedCheckpoint(tmp_path), verify=True)["non_finite"] == ["model.w"]


EXPORTS: dict[str, Callable[[Path, Path], Any]] = {
    "safetensors": lambda run, out: export_weights(SavedCheckpoint(run), out),
    "torch": lambda run, out: export_weights(SavedCheckpoint(run), out, format="torch"),
    "zero_to_fp32": convert_zero_checkpoint_to_fp32_state_dict,
}


def _growth(rank: int, world: int, folder: str) -> dict[str, int]:
    """Bytes by which this process grows at most in an export, after a small one of each kind."""
    grown = {}
    for name, write in EXPORTS.items():
        write(Path(folder) / "small", Path(folder) / f"small-{name}")
        before = resident_bytes() or 0
        reset_peak()
        write(Path(folder) / ("part" if name == "zero_to_fp32" else "whole"), Path(folder) / f"all-{name}")
        grown[name] = (peak_bytes() or 0) - before
    return grown


def test_memory_is_bounded_by_the_largest_parameter(tmp_path: Path) -> None:
    """64 tensors of 1 MiB each: the process grows by a few of them, not by all. zero_to_fp32 of a checkpoint without frozen parameters."""
    pieces = {f"model.w{i}": [Piece(f"w{i}", torch.Size((512, 512)), 0, torch.full((2**18,), float(i)))] for i in range(64)}
    save(tmp_path / "whole" / "a", pieces, {}, {}, **ALONE)
    save(tmp_path / "part" / "a", pieces, {"excluded": ["frozen"]}, {}, **ALONE)
    save(tmp_path / "small" / "a", {"model.w": [Piece("w", torch.Size((2,)), 0, torch.ones(2))]}, {}, {}, **ALONE)
    for name, grown in run_ranks(_growth, 1, str(tmp_path), timeout=60)[0].items():
        assert grown < 16 * 2**20, f"{name}: grew by {grown} bytes for 64 MiB of weights"
    found = torch.load(tmp_path / "all-zero_to_fp32" / "pytorch_model.bin", weights_only=True)
    assert all(bool((found[f"w{i}"] == i).all()) for i in range(64)) and len(found) == 64
