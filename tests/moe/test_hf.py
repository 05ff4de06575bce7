"""Mixtures of experts of transformers, converted in place, follow the original in one process and come back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.moe.common import distance
from tests.moe.hf_models import reference, settings, train
from tests.ranks import run_ranks

pytest.importorskip("transformers")


def check(world: int, runs: list[tuple[str, dict[str, Any]]]) -> None:
    got = run_ranks(train, world, runs, timeout=200)
    for i, (kind, config) in enumerate(runs):
        want = reference(kind, config.get("moe", {}).get("bias_speed", 0.0))
        losses = torch.tensor([r[i]["losses"] for r in got]).mean(0)
        assert distance(losses, torch.tensor(want["losses"])) <= 1e-5, (kind, config, losses, want["losses"])
        assert got[0][i]["whole"].keys() == want["weights"].keys()
        for r in got:
            assert r[i]["same"], (kind, "modules or names are not the original's")
            for name, value in want["weights"].items():
                assert distance(r[i]["back"][name], value) <= 1e-3, (kind, name)
                assert torch.equal(r[i]["back"][name], got[0][i]["whole"][name]), (kind, name)


def test_two_ranks() -> None:
    check(2, [
        ("mixtral", settings(2, 1)), ("mixtral aux", settings(2, 3)), ("qwen2", settings(2, 3)), ("qwen3 aux", settings(2, 2)),
        ("deepseek", settings(2, 1)), ("deepseek", settings(2, 3)), ("glm4", settings(2, 3)), ("ernie", settings(2, 2)),
        ("olmoe", settings(2, 0)), ("gpt-oss", settings(2, 3)),
        ("deepseek", settings(2, 2, moe={"bias_speed": 0.01})), ("qwen3", settings(2, 1, moe={"copies": True})),
        ("gpt-oss", settings(2, 1, moe={"copies": True})),
    ])  # fmt: skip


def test_layers_split_over_ranks_that_hold_the_same_experts() -> None:
    mesh = {"ep": 2, "tp": 2}
    check(4, [("mixtral", settings(2, 1, mesh=mesh)), ("qwen3", settings(2, 3, mesh=mesh))])


def test_sequences_split_between_the_layers() -> None:
    """Experts are whole on the ranks that split layers and sequences, and their gradients are summed over these."""
    splits = {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True, "check_replicas_every": 1}}
    kinds = (("mixtral", 1), ("mixtral aux", 3), ("qwen2", 2), ("qwen3", 0))
    check(2, [(kind, {**settings(1, stage), **splits}) for kind, stage in kinds])
    both = {**splits, "mesh": {"tp": 2, "ep": 2}}
    check(4, [("mixtral", {**settings(2, 1), **both}), ("qwen2", {**settings(2, 3), **both})])


def test_sequences_and_experts_over_the_same_ranks() -> None:
    check(2, [("mixtral", settings(2, 1, mesh={"ep": 2, "cp": 2})), ("qwen3", settings(2, 3, mesh={"ep": 2, "cp": 2}))])
