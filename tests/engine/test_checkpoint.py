"""Resume is exact on the same ranks, and follows one process on others; weights come out whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import TinyLM, config, tokens
from tests.ranks import run_ranks

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}}


def make(stage: int, dtype: str, seed: int = 1) -> Any:
    import zeroengine

    torch.manual_seed(seed)
    changes: dict[str, Any] = {**ADAM, **SCHEDULE}
    if dtype != "fp32":
        changes[dtype] = {"enabled": True}
    engine, *_ = zeroengine.initialize(model=TinyLM(), config=config(stage, **changes))
    return engine


def steps(engine: Any, first: int, count: int, rank: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = engine(*tokens(step, 0, rank)) + 0.0 * torch.rand(())  # draws from the generator
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_in_the_middle(rank: int, world: int, folder: str, stages: list[int], dtype: str) -> dict[int, tuple[list[float], float]]:
    after = {}
    for stage in stages:
        engine = make(stage, dtype)
        steps(engine, 0, 3, rank)
        engine.save_checkpoint(f"{folder}/{stage}", client_state={"note": [stage, "x"]})
        after[stage] = (steps(engine, 3, 3, rank), float(torch.rand(())))
        engine.destroy()
    return after


def resume(rank: int, world: int, folder: str, plans: list[tuple[int, int]], dtype: str) -> list[tuple[list[float], float, Any]]:
    """Each plan is (stage that saved, stage that loads)."""
    results = []
    for saved, stage in plans:
        engine = make(stage, dtype, seed=7)
        path, client = engine.load_checkpoint(f"{folder}/{saved}")
        assert path is not None and engine.global_steps == 3
        losses = steps(engine, 3, 3, rank)
        results.append((losses, float(torch.rand(())), (client, engine.get_lr())))
        engine.destroy()
    return results


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_is_exact_at_every_stage_and_from_every_stage(tmp_path: Path, dtype: str) -> None:
    stages = [0, 1, 2, 3]
    uninterrupted = run_ranks(save_in_the_middle, 2, str(tmp_path), stages, dtype, timeout=200)
    plans = [(a, b) for a in stages for b in stages if a == b or (a, b) in ((0, 3), (3, 0), (1, 2), (3, 1))]
    resumed = run_ranks(resume, 2, str(tmp_path), plans, dtype, timeout=200)
    for rank in range(2):
        for (saved, _), (losses, random, (client, rates)) in zip(plans, resumed[rank], strict=True):
            assert losses == uninterrupted[rank][saved][0]
            assert random == uninterrupted[rank][saved][1]
            assert client == {"note": [saved, "x"]}
            assert rates == [pytest.approx(1e-2)]


def test_resume_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    before = run_ranks(save_in_the_middle, 2, str(tmp_path), [1, 3], "fp32", timeout=100)
    del before
    weights = {}
    for world in (1, 2, 3):
        weights[world] = run_ranks(weights_after_load, world, str(tmp_path), timeout=100)[0]
    for world in (1, 3):
        for key, tensor in weights[2].items():
            assert torch.equal(weights[world][key], tensor), (world, key)


def weights_after_load(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    found = {}
    for saved, stage in ((1, 3), (3, 1), (3, 0)):
        engine = make(stage, "fp32", seed=9)
        engine.load_checkpoint(f"{folder}/{saved}")
        full = engine.full_state_dict()
        found.update({f"{saved}->{stage} {n}": t for n, t in (full or {}).items()})
        engine.destroy()
    return found


def load_weights_only(rank: int, world: int, folder: str) -> tuple[bool, str, Any]:
    from zeroengine.errors import CheckpointError

    engine = make(2, "bf16", seed=5)
    engine.load_checkpoint(f"{folder}/3", load_module_only=True)
    assert engine.global_steps == 0
    engine.optimizer.param_groups[0]["lr"] = 0.0
    before = engine.full_state_dict()
    engine.backward(engine(*tokens(0, 0, rank)))
    engine.step()  # with learning rate 0 the masters are written back: they must have followed the loaded weights
    after = engine.full_state_dict()
    same = rank != 0 or all(torch.equal(before[n], after[n]) for n in before)
    try:
        engine.load_checkpoint(folder, tag="nowhere")
        told = ""
    except CheckpointError as error:
        told = str(error)
    nothing = engine.load_checkpoint(f"{folder}/empty")
    engine.save_16bit_model(folder, "weights.bin")
    return same, told, nothing


def test_weights_only_and_weights_out(tmp_path: Path) -> None:
    run_ranks(save_in_the_middle, 2, str(tmp_path), [3], "bf16", timeout=100)
    for same, told, nothing in run_ranks(load_weights_only, 2, str(tmp_path), timeout=100):
        assert same
        assert "nowhere" in told
        assert nothing == (None, {})
    out = torch.load(tmp_path / "weights.bin", weights_only=True)
    model = TinyLM().to(torch.bfloat16)
    model.load_state_dict(out)  # every name is there, with its shape
    assert torch.equal(out["head.weight"], out["emb.weight"])
