"""Training with state and values elsewhere gives the bits of training without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.offload.runs import Plan, Run, difference, run_all
from tests.ranks import run_ranks

CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
SMALL = {"device": "nvme", "buffer_count": 2}  # fewer buffers than buckets: everything passes through them


def compare(world: int, folder: Path, pairs: list[tuple[Plan, list[Plan]]], env: dict[str, str] | None = None) -> list[list[Run]]:
    plans = [p for plain, others in pairs for p in (plain, *others)]
    results = run_ranks(run_all, world, plans, str(folder), timeout=200, env=env)
    for runs in results:
        at = iter(runs)
        for _, others in pairs:
            expected = next(at)
            for other in others:
                got = next(at)
                assert not (told := difference(expected, got)), f"{other}: {told}"
                on_disk = "nvme" in str(other.state) + str(other.values)
                assert (got.moved["written"] > 0) is on_disk, other
    return results


def places(stage: int, **fixed: Any) -> tuple[Plan, list[Plan]]:
    """A plan without offload, and the ways to offload at that stage."""
    others: list[tuple[Any, Any]] = [(CPU, None), (SMALL, None)]
    if stage == 3:
        others += [(None, SMALL), (SMALL, SMALL)]
    return Plan(stage, **fixed), [Plan(stage, state, values, **fixed) for state, values in others]


@pytest.mark.parametrize("world", [2, 4])
def test_stages_and_types(world: int, tmp_path: Path) -> None:
    clipped = {"gradient_clipping": 0.5}
    pairs = [places(stage, dtype=dtype, changes=clipped) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
    compare(world, tmp_path, pairs)


def test_optimizers(tmp_path: Path) -> None:
    """Ours, torch's own loops, classes that see whole parameters, and the parts of one that sees both."""
    sections: list[Any] = [
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        {"type": "Lion", "params": {"lr": 1e-3}},
        {"type": "Adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.1}},
        {"type": "RMSprop", "params": {"lr": 1e-3}},
        {"type": "Muon", "params": {"lr": 1e-2}},
        {"type": "Lamb", "params": {"lr": 1e-2}},
        "torch",
        "unknown",
    ]
    pairs = []
    for i, section in enumerate(sections):
        stage, dtype = 1 + i % 3, ("fp32", "bf16")[i % 2]
        fixed = {"optimizer": section, "dtype": dtype, "changes": {"gradient_clipping": 0.5}}
        pairs.append((Plan(stage, **fixed), [Plan(stage, SMALL, SMALL if stage == 3 else None, **fixed)]))
    compare(2, tmp_path, pairs)


def test_ways_of_training(tmp_path: Path) -> None:
    """Accumulation, fp16, parameters that stay whole, a part of the state only, and every switch of the section."""
    scaled = {"fp16": {"initial_scale_power": 4}}
    switched = {**SMALL, "pipeline_read": False, "pipeline_write": False, "fast_init": True, "pin_memory": False}
    kept = {"zero_optimization": {"stage3_param_persistence_threshold": 30}}
    pairs = [
        (Plan(2, changes={"gradient_accumulation_steps": 3}), [Plan(2, SMALL, changes={"gradient_accumulation_steps": 3})]),
        (Plan(3, dtype="fp16", changes=scaled), [Plan(3, SMALL, SMALL, "fp16", changes=scaled)]),
        (Plan(3, changes=kept), [Plan(3, SMALL, SMALL, changes=kept), Plan(3, SMALL, {**SMALL, "max_in_cpu": 900}, changes=kept)]),
        (Plan(1, dtype="bf16"), [Plan(1, {**SMALL, "ratio": 0.5}, dtype="bf16"), Plan(1, {**SMALL, "buffer_count": 1}, dtype="bf16")]),
        (Plan(3), [Plan(3, switched), Plan(3, SMALL, {**SMALL, "buffer_count": 1}), Plan(3, CPU, {**SMALL, "buffer_size": 300})]),
        (Plan(0), [Plan(0, SMALL)]),
        (Plan(0, dtype="bf16"), [Plan(0, SMALL, dtype="bf16")]),
    ]
    results = compare(2, tmp_path, pairs)
    runs = [r for r in results[0] if r.moved["written"]]
    assert all(r.moved["read"] > 0 for r in runs)


def test_without_a_compiler(tmp_path: Path) -> None:
    compare(2, tmp_path, [(Plan(2, dtype="bf16"), [Plan(2, SMALL, dtype="bf16")])], {"ZE_OPS": "twin"})


def test_shard_groups_and_four_ranks(tmp_path: Path) -> None:
    groups = {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "gradient_clipping": 0.5}
    pairs = [(Plan(stage, changes=groups), [Plan(stage, SMALL, SMALL if stage == 3 else None, changes=groups)]) for stage in (2, 3)]
    compare(4, tmp_path, pairs)
