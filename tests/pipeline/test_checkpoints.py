"""Checkpoints and weights of a pipeline are those of the model that is not cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroengine
from tests.engine.models import Block
from tests.pipeline import common
from tests.ranks import run_ranks
from zeroengine.checkpoint import SavedCheckpoint, export_weights
from zeroengine.errors import CheckpointError
from zeroengine.pipeline.layers import LayerSpec
from zeroengine.pipeline.module import PipelineModule

SETTINGS = {"bf16": {"enabled": True}}


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def _cut_llama(rank: int, world: int, folder: str, cuts: list[tuple[str | None, int, int, str | None]]) -> list[Any]:
    """Each cut: (checkpoint to load, stages of the pipeline or 0, ZeRO stage, checkpoint to save)."""
    from zeroengine.pipe import split_causal_lm

    zeroengine.init_distributed(verbose=False)
    found = []
    for load, stages, zero, save in cuts:
        model = _llama()
        for p in model.model.layers[3].mlp.parameters():  # frozen on one stage only
            p.requires_grad_(False)
        if load is not None:
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(0.5)
        model = split_causal_lm(model, stages) if stages else model
        settings = common.config(zero, 2 if stages else 1, **SETTINGS)
        engine, *_ = zeroengine.initialize(model=model, config=settings)
        if load is not None:
            engine.load_checkpoint(f"{folder}/{load}")
        else:
            engine.train_batch(iter([_batch(0), _batch(1)]))
        if save is not None:
            engine.save_checkpoint(f"{folder}/{save}")
            engine.save_16bit_model(f"{folder}/{save}", "weights.bin")
            engine.save_pretrained(f"{folder}/{save}/live", max_shard_size="2KB")
        found.append((engine.full_state_dict(), engine.global_steps))
        engine.destroy()
    return found


def test_a_pipelined_hugging_face_model_and_the_whole_one_load_each_other(tmp_path: Path) -> None:
    """Tied weights and a frozen part on one of two stages; a tied weight is saved once, under the model's own name."""
    d = tmp_path
    saved = run_ranks(_cut_llama, 2, str(d), [(None, 2, 2, "two")], timeout=150)[0][0][0]
    weights = torch.load(d / "two" / "weights.bin", weights_only=True)
    assert weights.keys() == saved.keys() == _llama().state_dict().keys()
    assert all(torch.equal(weights[n], saved[n]) for n in saved)
    plan = [("two", 0, 3, "whole"), ("two", 1, 1, "one")]
    for whole, steps in run_ranks(_cut_llama, 1, str(d), plan, timeout=100)[0]:
        assert steps == 1 and all(torch.equal(whole[n], saved[n]) for n in saved)
    plan = [("whole", 2, 3, "again"), ("one", 2, 0, None)]
    for whole, steps in run_ranks(_cut_llama, 2, str(d), plan, timeout=150)[0]:
        assert steps == 1 and all(torch.equal(whole[n], saved[n]) for n in saved)
    # masters, moments and counts as well: the files hold the same tensors to the last bit
    kept = [SavedCheckpoint(d / name) for name in ("two", "whole", "one", "again")]
    for other in kept[1:]:
        assert other.index == kept[0].index
        assert all(torch.equal(other.read(key), kept[0].read(key)) for key in other.index)
    assert "optim.model.embed_tokens.weight.exp_avg" in kept[0].index and "model.lm_head.weight" not in kept[0].index
    export_weights(kept[0], d / "out")
    from safetensors.torch import load_file

    exported = load_file(d / "out" / "model.safetensors")
    for folder in (d / "out", d / "two" / "live"):
        written = json.loads((folder / "config.json").read_text())
        assert written["architectures"] == ["LlamaForCausalLM"] and written["num_hidden_layers"] == 5
    assert set(exported) >= set(saved) - {"lm_head.weight"}
    assert all(torch.equal(exported[n], saved[n]) for n in exported)
    live = {n: t for f in (d / "two" / "live").glob("*.safetensors") for n, t in load_file(f).items()}
    assert all(torch.equal(live[n], saved[n]) for n in live) and set(live) == set(exported)


def _layers(count: int) -> list[Any]:
    return [LayerSpec(nn.Embedding, 11, 8), *[LayerSpec(Block, 8) for _ in range(count)], LayerSpec(nn.Linear, 8, 11)]


def _uneven(rank: int, world: int, folder: str, load: str | None) -> dict[str, Tensor] | None:
    zeroengine.init_distributed(verbose=False)
    model = PipelineModule(_layers(3), world, common.cross_entropy, partition_method="uniform", base_seed=1 if load else 7)
    engine, *_ = zeroengine.initialize(model=model, config=common.config(1, 2))
    if load is None:
        engine.train_batch(common.batches(0, 2, 0))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    weights = engine.full_state_dict()
    return weights


def test_every_layer_once_when_stages_do_not_divide_the_layers(tmp_path: Path) -> None:
    saved = run_ranks(_uneven, 2, str(tmp_path), None, timeout=100)[0]
    index = SavedCheckpoint(tmp_path).index
    assert {key.split(".")[2] for key in index if key.startswith("model.layers.")} == {"0", "1", "2", "3", "4"}
    loaded = run_ranks(_uneven, 3, str(tmp_path), "load", timeout=100)[0]
    assert all(torch.equal(loaded[n], v) for n, v in saved.items())


def _misfits(rank: int, world: int, folder: str) -> list[str]:
    zeroengine.init_distributed(verbose=False)
    told = []

    def engine_of(count: int, frozen: bool = False) -> Any:
        model = PipelineModule(_layers(count), world, common.cross_entropy, partition_method="uniform")
        for name, p in model.named_parameters():
            if frozen and name.startswith("layers.4."):
                p.requires_grad_(False)
        return zeroengine.initialize(model=model, config=common.config(2, 2))[0]

    engine = engine_of(3, frozen=True)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    engine.load_checkpoint(folder)  # what is left out is frozen, on the last stage only
    told.append(str(SavedCheckpoint(folder).values()["excluded"]))
    engine.destroy()
    for count in (4, 2):
        engine = engine_of(count)
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            told.append(str(error))
        engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
        engine.destroy()
    return told


def test_what_does_not_fit_is_told_on_every_stage(tmp_path: Path) -> None:
    results = run_ranks(_misfits, 2, str(tmp_path), timeout=100)
    assert results[0] == results[1]
    left_out, longer, shorter = results[0]
    assert left_out == "['layers.4.weight', 'layers.4.bias']"
    assert "missing keys: model.layers.4.down.bias" in longer and "model.layers.5.weight" in longer
    assert "unexpected keys: model.layers.3.down.bias" in shorter
