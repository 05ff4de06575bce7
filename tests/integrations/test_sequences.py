"""Trainers whose ranks share sequences: `ParallelismConfig(sp_size=2)` through the stand-in, and `mesh.cp` of ZeroTrainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.sequences import WAYS, run_sequences
from tests.integrations.tiny import close, pretrained
from tests.ranks import run_ranks
from zeroengine.integrations.batches import tokens_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = str(pretrained(tmp_path_factory.mktemp("model")))
    return run_ranks(run_sequences, 2, folder, str(tmp_path_factory.mktemp("runs")), timeout=200, server="stand_in")


@pytest.mark.parametrize("way", WAYS)
def test_shared_sequences_train_as_the_trainer_without_an_engine(way: str, results: list[dict[str, dict[str, Any]]]) -> None:
    for rank, found in enumerate(results):
        expected, got = found["plain" if way == "native" else "uniform"], found[way]
        if rank == 0:
            assert close(got["train"], expected["train"]), (got["train"], expected["train"])
            assert close(got["norms"], expected["norms"], 1e-4), (got["norms"], expected["norms"])
            assert got["resumed"] == got["train"]  # to the last bit
        assert close([got["eval"]], [expected["eval"]])
        assert close(got["logits"], expected["logits"], 1e-4) and close(got["saved"], got["logits"], 1e-5)
        assert got["generated"] == expected["generated"]


def test_shared_layers_train_as_well_and_sequences_that_accelerate_does_not_know_of_are_refused(
    results: list[dict[str, dict[str, Any]]],
) -> None:
    got, expected = results[0]["layers"], results[0]["plain"]
    assert len(got["train"]) == 5 and close(got["train"][:2], expected["train"][:2])  # of an epoch; its last batch is another
    assert all("parallelism_config" in found["layers"]["refused"] for found in results)


def test_parts_of_a_batch_are_padded_and_know_their_positions() -> None:
    batch = {"input_ids": torch.arange(10).view(2, 5), "labels": torch.arange(10).view(2, 5), "name": "x"}
    parts = [tokens_of(rank, 2)(batch) for rank in range(2)]
    assert [p["input_ids"].tolist() for p in parts] == [[[0, 1, 2], [5, 6, 7]], [[3, 4, 0], [8, 9, 0]]]
    assert [p["shift_labels"].tolist() for p in parts] == [[[1, 2, 3], [6, 7, 8]], [[4, -100, -100], [9, -100, -100]]]
    assert [p["position_ids"][0].tolist() for p in parts] == [[0, 1, 2], [3, 4, 5]]
    assert [p["attention_mask"][0].tolist() for p in parts] == [[1, 1, 1], [1, 1, 0]] and parts[1]["name"] == "x"
    assert "labels" not in parts[0]
