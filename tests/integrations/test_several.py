"""Several engines in one process, and adapters that are merged under stage 3."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.several import run
from tests.integrations.tiny import pretrained
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run, 2, str(pretrained(tmp_path_factory.mktemp("model"))), timeout=150, server="stand_in")


def test_losses_through_two_engines_train_both_as_torch_does(results: list[dict[str, Any]]) -> None:
    for got in results:
        assert len(got["adversaries"]) == 6 and all(worst < 1e-5 for worst in got["adversaries"].values()), got["adversaries"]


def test_a_reference_model_needs_no_optimizer_and_is_sharded_too(results: list[dict[str, Any]]) -> None:
    for result in results:
        for stage, got in zip((1, 2, 3), result["reference"], strict=True):
            assert got == {"unchanged": True, "trained": True, "optimizer": None, "cut": stage == 3}


def test_an_adapter_merges_inside_a_gather_and_says_so_outside(results: list[dict[str, Any]]) -> None:
    for result in results:
        got = result["merging"]
        assert got["outside"].startswith("ReleasedParameterError") and "GatheredParameters" in got["outside"], got["outside"]
        assert got["merged"] < 1e-4 and got["unmerged"] < 1e-4, got
