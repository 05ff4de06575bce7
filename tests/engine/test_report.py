"""Bytes held and bytes moved: measured equal to planned, and to the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.models import TinyLM, config, tokens
from tests.ranks import run_ranks


def count(rank: int, world: int, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import zeroengine

    found = []
    for plan in plans:
        torch.manual_seed(0)
        changes = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **plan["changes"]}
        engine, *_ = zeroengine.initialize(model=TinyLM(tied=False), config=config(plan["stage"], **changes))
        accumulation = engine.gradient_accumulation_steps()
        steps = 2
        for step in range(steps):
            if step == 1:
                engine.reset_traffic()
            for micro in range(accumulation):
                engine.backward(engine(*tokens(step, micro, rank)))
                engine.step()
        padded = sum(b.layout.padded for b in engine.mechanism.buckets)
        found.append(
            {
                "measured": engine.memory_report(),
                "planned": engine.planned_memory(),
                "moved": engine.traffic(),
                "planned_traffic": engine.planned_traffic(),
                "padded": padded,
                "parameters": sum(p.numel() for p in engine.module.parameters()),
            }
        )
        engine.destroy()
    return found


ONE_BUCKET = {"zero_optimization": {"bucket_size": 10**7}}
REPLICAS = {"mesh": {"dp_replicate": 2, "dp_shard": 1}, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("world", [2, 3])
def test_memory_and_traffic_are_as_planned(world: int) -> None:
    kinds: list[dict[str, Any]] = [{}, ONE_BUCKET, {"bf16": {"enabled": True}}, {**ONE_BUCKET, "gradient_accumulation_steps": 4}]
    kinds += [REPLICAS] if world == 2 else []
    plans = [{"stage": stage, "changes": kind} for kind in kinds for stage in range(4)]
    for rank, results in enumerate(run_ranks(count, world, plans, timeout=200)):
        for plan, got in zip(plans, results, strict=True):
            told = f"rank {rank} {plan}"
            for kind in ("parameters", "gradients", "optimizer"):
                assert got["measured"][kind] == got["planned"][kind], f"{told}: {kind}"
            several = plan["changes"] is not ONE_BUCKET and "gradient_accumulation_steps" not in plan["changes"]
            if plan["stage"] < 3 or not several:
                assert got["moved"]["total"] == got["planned_traffic"], told
            else:  # backward does not read the embedding's values, and its bucket is not gathered for it
                assert got["moved"]["total"] <= got["planned_traffic"], told
    # The formulas themselves, in elements: 2 P (N-1)/N at stages 0 to 2, 3 P (N-1)/N at stage 3 (fp32, no accumulation).
    for stage, got in enumerate(results[4:8]):
        elements = (3 if stage == 3 else 2) * got["padded"] * (world - 1) // world
        assert got["moved"]["total"] == 4 * elements
        assert got["padded"] - got["parameters"] < world  # one bucket is padded by less than one element a rank
    if world == 2:  # the only slice is the whole: no stage needs a second buffer for gradients, or moves more than another
        assert len({got["measured"]["gradients"] for got in results[16:]}) == 1
        assert len({got["moved"]["total"] for got in results[16:]}) == 1
    for stage, got in enumerate(results[0:4]):
        share = -(-got["parameters"] // world)
        memory = got["measured"]
        slack = 4 * 7 * world  # padding of 7 buckets
        assert memory["parameters"] - 4 * (share if stage == 3 else got["parameters"]) <= slack
        assert memory["gradients"] - 4 * (share if stage >= 1 else got["parameters"]) <= slack
        assert memory["optimizer"] - 8 * (share if stage >= 1 else got["parameters"]) <= slack + 8 * 700


def watch_live(rank: int, world: int) -> tuple[int, int, int]:
    import zeroengine

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
            self.most = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
                self.most = max(self.most, engine.memory_report()["working"] - idle)
            return x.sum()

    settings = config(3, zero_optimization={"bucket_size": 32 * 33})
    engine, *_ = zeroengine.initialize(model=Deep(), config=settings)
    idle = 0
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 32)))
        engine.step()
    idle = engine.memory_report()["working"]
    gathered = sum(1 for b in engine.mechanism.buckets if b.full is not None)
    engine.module.most = 0
    engine(torch.randn(2, 32))
    return engine.module.most, 4 * 32 * 33, gathered


def test_gathered_layers_are_bounded_by_prefetch_plus_one() -> None:
    for most, layer, after_step in run_ranks(watch_live, 2, timeout=60):
        assert most <= 2 * layer
        assert after_step == 0
