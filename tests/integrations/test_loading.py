"""from_pretrained under ZeRO-3, by transformers' own path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.loading import load_before_everything, load_big, resize, save_big
from tests.integrations.tiny import close, pretrained
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("untied"), tied=False)


def test_a_model_that_is_loaded_before_anything_else_exists(tied: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(tied)
    results = run_ranks(load_before_everything, 2, str(tied), str(tmp_path), timeout=120, server="stand_in")
    for got in results:
        assert not got["started"] and got["cut"] and got["tied"]
        for name, p in expected.named_parameters(remove_duplicate=False):
            assert torch.equal(got["values"][name], p), name
        buffers = dict(expected.named_buffers())
        assert buffers.keys() == got["buffers"].keys() and all(torch.equal(got["buffers"][n], buffers[n]) for n in buffers)
        for what in ("state_dict", "save_pretrained"):
            assert got[what].startswith("ReleasedParameterError") and "engine.save_16bit_model" in got[what], got[what]
        assert got["resize"].startswith("ModelError") and "embed_tokens.weight" in got["resize"], got["resize"]
        cut, spread, values = got["from_config"]
        assert cut and all(torch.equal(values[n], results[0]["from_config"][2][n]) for n in values)
        assert spread["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.02, rel=0.1)  # transformers' initialiser ran
        assert spread["model.norm.weight"] == 0
    assert len(results[0]["losses"]) == 2 and close([results[0]["evaluated_first"]], [results[1]["evaluated_first"]], 1e-7)


def test_embeddings_grow_alike_on_all_ranks_and_heads_that_are_missing_are_made(tied: Path, untied: Path, tmp_path: Path) -> None:
    results = run_ranks(resize, 2, str(tied), str(untied), str(tmp_path), timeout=120, server="stand_in")
    for case, is_tied in ((0, True), (1, False)):
        one, other = results[0][case], results[1][case]
        assert one["tied"] is is_tied and one["size"] == 80
        for name, value in one["after"].items():
            assert torch.equal(value, other["after"][name]), name
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            old, new = one["before"][name], one["after"][name]
            assert new.shape[0] == 80 and (new[: len(old)] - old).abs().max() < 0.1  # two steps away, with a rate of 1e-2
            assert new[len(old) :].abs().sum() > 0
        assert len(one["losses"]) == 2
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(tied).get_input_embeddings().weight
    for got in (results[0][2], results[1][2]):
        assert torch.equal(got["embed"], expected) and torch.equal(got["head"], results[0][2]["head"])
        assert 0.005 < got["head"].std() < 0.05


def test_no_rank_holds_more_than_its_share_and_the_largest_tensors(tmp_path: Path) -> None:
    size = save_big(tmp_path)
    assert size > 100 * 2**20
    for grown, largest in run_ranks(load_big, 2, str(tmp_path), timeout=120, server="stand_in"):
        assert grown < size / 2 + 3 * largest + 24 * 2**20, f"{grown / 2**20:.0f} MiB for a share of {size / 2**21:.0f}"
