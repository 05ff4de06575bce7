"""State that lives on a disk: in checkpoints, through the access functions, after edits, in skipped steps, in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import config
from tests.offload.runs import ADAMW, Plan, Run, advance, difference, moved, run_all, start
from tests.ranks import run_ranks

DISK = {"device": "nvme", "buffer_count": 2}


def _resume(rank: int, world: int, folder: str, stage: int, dtype: str) -> list[str]:
    faults = []
    for saving, loading in ((False, True), (True, False), (True, True)):
        ways = {False: Plan(stage, dtype=dtype), True: Plan(stage, DISK, DISK if stage == 3 else None, dtype)}
        at = f"{folder}/{saving}{loading}"
        whole = start(ways[False], folder)
        expected = advance(whole, rank, 0, 4)
        weights = whole.full_state_dict()
        whole.destroy()
        first = start(ways[saving], folder)
        advance(first, rank, 0, 2)
        first.save_checkpoint(at, blocking=loading)
        going_on = advance(first, rank, 2, 2)
        first.destroy()
        second = start(ways[loading], folder, seed=7)
        advance(second, rank, 5, 1)
        second.load_checkpoint(at)
        resumed = advance(second, rank, 2, 2)
        again = second.full_state_dict()
        second.destroy()
        if not going_on == resumed == (expected[0][2:], expected[1][2:]):
            faults.append(f"saved {saving}, loaded {loading}: {going_on}, {resumed} instead of {expected}")
        if rank == 0 and not all(torch.equal(w, again[n]) for n, w in weights.items()):
            faults.append(f"saved {saving}, loaded {loading}: other weights")
    return faults


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_checkpoints_with_and_without_a_disk(stage: int, dtype: str, tmp_path: Path) -> None:
    assert run_ranks(_resume, 2, str(tmp_path), stage, dtype, timeout=150) == [[], []]


def _edited(rank: int, world: int, folder: str) -> list[str]:
    """An edit right before a save: the masters on the disk follow it, and the checkpoint has it."""
    faults = []
    for stage in (1, 2):
        plan = Plan(stage, DISK, dtype="bf16")
        engine = start(plan, folder)
        advance(engine, rank, 0, 1)
        with torch.no_grad():
            for p in engine.module.parameters():
                p.mul_(0.5)
        weights = engine.full_state_dict()
        engine.save_checkpoint(f"{folder}/{stage}")
        going_on = advance(engine, rank, 1, 1)
        engine.destroy()
        engine = start(plan, folder, seed=7)
        engine.load_checkpoint(f"{folder}/{stage}")
        again = engine.full_state_dict()
        if rank == 0 and not all(torch.equal(w, again[n]) for n, w in weights.items()):
            faults.append(f"stage {stage}: other weights")
        if advance(engine, rank, 1, 1) != going_on:
            faults.append(f"stage {stage}: another step")
        engine.destroy()
    return faults


def test_an_edit_before_a_save(tmp_path: Path) -> None:
    assert run_ranks(_edited, 2, str(tmp_path), timeout=100) == [[], []]


def _access(rank: int, world: int, folder: str) -> list[str]:
    from zeroengine import utils
    from zeroengine.zero import GatheredParameters

    faults = []
    for stage, dtype in ((1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")):
        seen: list[list[torch.Tensor]] = []
        for plan in (Plan(stage, dtype=dtype), Plan(stage, DISK, DISK if stage == 3 else None, dtype)):
            engine = start(plan, folder)
            advance(engine, rank, 0, 1)
            p = engine.module.blocks[1].up.weight
            found = [utils.safe_get_full_fp32_param(p), utils.safe_get_full_optimizer_state(p, "exp_avg")]
            found.append(utils.safe_get_full_optimizer_state(p, "step"))
            utils.safe_set_full_fp32_param(p, torch.full_like(found[0], 0.03))
            utils.safe_set_full_optimizer_state(p, torch.full_like(found[1], 0.01), "exp_avg_sq")
            with GatheredParameters(engine.module.blocks[0].down.weight, modifier_rank=0):
                with torch.no_grad():
                    engine.module.blocks[0].down.weight.mul_(1.5 if rank == 0 else 1.0)
            losses, _ = advance(engine, rank, 1, 2)
            found += [utils.safe_get_full_fp32_param(p), utils.safe_get_full_optimizer_state(p, "exp_avg_sq")]
            seen.append([*found, torch.tensor(losses)])
            if stage == 3 or dtype == "bf16":
                local = utils.safe_get_local_fp32_param(p)
                if local is not None and bool(local.isnan().any()):
                    faults.append(f"stage {stage} {dtype}: local values have none")
            engine.destroy()
        for i, (a, b) in enumerate(zip(*seen, strict=True)):
            if not torch.equal(a, b):
                faults.append(f"stage {stage} {dtype}: {i} differs")
    return faults


def test_access_and_edits(tmp_path: Path) -> None:
    assert run_ranks(_access, 2, str(tmp_path), timeout=150) == [[], []]


def _skips(rank: int, world: int, folder: str) -> list[str]:
    faults = []
    for plan in (Plan(2, DISK, dtype="bf16"), Plan(3, DISK, DISK)):
        engine = start(plan, folder)
        advance(engine, rank, 0, 1)
        before, stored = engine.full_state_dict(), moved(engine)["written"]
        loss = engine(*[t for t in _batch(rank)])
        engine.backward(loss * float("nan"))
        engine.step()
        if engine.was_step_applied() or moved(engine)["written"] != stored:
            faults.append(f"{plan}: applied, or written")
        after = engine.full_state_dict()
        if rank == 0 and not all(torch.equal(w, after[n]) for n, w in before.items()):
            faults.append(f"{plan}: weights changed")
        losses, _ = advance(engine, rank, 1, 2)
        if any(x != x for x in losses):
            faults.append(f"{plan}: NaN afterwards")
        engine.destroy()
    return faults


def _batch(rank: int) -> Any:
    from tests.engine.models import tokens

    return tokens(1, 0, rank)


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    assert run_ranks(_skips, 2, str(tmp_path), timeout=100) == [[], []]


@pytest.mark.parametrize("buffers", [1, 3])
def test_memory_is_as_planned(buffers: int, tmp_path: Path) -> None:
    disk = {"device": "nvme", "buffer_count": buffers}
    plans = [
        Plan(stage, disk, values, dtype) for stage, values in ((1, None), (2, None), (3, None), (3, disk)) for dtype in ("fp32", "bf16")
    ]
    plans.append(Plan(2, {**disk, "ratio": 0.5}))
    for results in run_ranks(run_all, 2, plans, str(tmp_path), timeout=150):
        for plan, got in zip(plans, results, strict=True):
            for kind in ("parameters", "gradients", "optimizer", "disk", "staging"):
                assert got.memory[kind] == got.planned[kind], f"{plan}: {kind} {got.memory} {got.planned}"
            assert got.memory["disk"] > 0 and got.memory["staging"] > 0
            part = "ratio" in plan.state
            assert (got.memory["optimizer"] > 0) is part
            assert (got.memory["parameters"] > 0) is (plan.values is None)
        half = results[-1].memory
        assert 0.4 < half["disk"] / (half["disk"] + half["optimizer"]) < 0.6


def _scenario(rank: int, world: int, folder: str) -> list[str]:
    """One layer, buffers smaller than a tensor, one bucket and many; a checkpoint in between."""
    import zeroengine

    faults, losses = [], []
    for bucket in (7, 10**6):
        for section in (None, {"device": "nvme", "nvme_path": folder, "buffer_count": 1}):
            torch.manual_seed(2)
            zero = {"bucket_size": bucket, **({"offload_optimizer": section} if section else {})}
            settings = config(2, zero_optimization=zero, optimizer=ADAMW, gradient_clipping=1.0)
            engine = zeroengine.initialize(model=torch.nn.Linear(9, 5), config=settings)[0]
            for step in range(3):
                x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank))
                loss = engine(x).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if step == 1:
                    engine.save_checkpoint(f"{folder}/saved")
            engine.destroy()
        if losses[-6:-3] != losses[-3:]:
            faults.append(f"bucket {bucket}: {losses}")
    return faults


def test_one_layer_and_tiny_buffers(tmp_path: Path) -> None:
    assert run_ranks(_scenario, 2, str(tmp_path), timeout=100) == [[], []]


def test_difference_sees() -> None:
    a = Run([1.0], [1.0], {"w": torch.ones(2)}, {}, {}, {})
    assert not difference(a, Run([1.0], [1.0], {"w": torch.ones(2)}, {}, {}, {}))
    assert "w" in difference(a, Run([1.0], [1.0], {"w": torch.zeros(2)}, {}, {}, {}))
    assert "losses" in difference(a, Run([2.0], [1.0], {}, {}, {}, {}))
