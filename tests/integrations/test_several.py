"""Several engines in one process, and adapters that are merged under stage 3."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.several import actor_and_reference, adversaries, merging
from tests.integrations.tiny import pretrained
from tests.ranks import run_ranks


def test_losses_through_two_engines_train_both_as_torch_does() -> None:
    for worst in run_ranks(adversaries, 2, [1, 2, 3], timeout=120):
        assert all(difference < 1e-5 for difference in worst.values()), worst


def test_a_reference_model_needs_no_optimizer_and_is_sharded_too() -> None:
    for results in run_ranks(actor_and_reference, 2, timeout=90):
        for stage, got in zip((1, 2, 3), results, strict=True):
            assert got == {"unchanged": True, "trained": True, "optimizer": None, "cut": stage == 3}


def test_an_adapter_merges_inside_a_gather_and_says_so_outside(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model")
    for got in run_ranks(merging, 2, str(folder), timeout=90):
        assert got["outside"].startswith("ReleasedParameterError") and "GatheredParameters" in got["outside"], got["outside"]
        assert got["merged"] < 1e-4 and got["unmerged"] < 1e-4, got
