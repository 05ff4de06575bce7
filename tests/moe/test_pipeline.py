"""Experts inside pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import VOCABULARY
from tests.pipeline import common
from tests.ranks import run_ranks
from zeroengine.moe import ExpertBank, ExpertList, MoE, RouterRule
from zeroengine.pipeline.layers import LayerSpec
from zeroengine.pipeline.module import PipelineModule

WIDTH, STEPS, MICRO = common.WIDTH, 2, 4


class Mixture(nn.Module):
    def __init__(self, as_list: bool) -> None:
        super().__init__()
        experts: Any = ExpertList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]) if as_list else ExpertBank(4, WIDTH, 12)
        self.moe = MoE(WIDTH, experts, rule=RouterRule(k=2, aux_weight=0.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


def module(stages: int, schedule: str = "1f1b") -> PipelineModule:
    """Experts on the first of two stages only, or on both."""
    layers = [
        LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(Mixture, False), LayerSpec(Mixture, True), LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Tanh), LayerSpec(Mixture, False), LayerSpec(nn.Linear, WIDTH, VOCABULARY),
    ]  # fmt: skip
    return PipelineModule(layers, stages, common.cross_entropy, partition_method="uniform", schedule=schedule)


def _train(rank: int, world: int, runs: list[tuple[str, int]]) -> list[Any]:
    import zeroengine

    zeroengine.init_distributed(verbose=False)
    found = []
    for schedule, stage in runs:
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        config = common.config(stage, MICRO, mesh={"pp": 2, "ep": 2}, gradient_clipping=0.5, optimizer=sgd)
        engine, *_ = zeroengine.initialize(model=module(2, schedule), config=config)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(float(engine.train_batch(common.batches(step, MICRO, rank % 2))))
            norms.append(engine.get_global_grad_norm())
        found.append((losses, norms, engine.full_state_dict()))
        engine.destroy()
    return found


def test_experts_in_stages_follow_one_process() -> None:
    runs = [("1f1b", 1), ("zb-h1", 3), ("gpipe", 2)]
    got = run_ranks(_train, 4, runs, timeout=150)
    torch.manual_seed(0)  # as the ranks are started
    model = module(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        pairs = [common.batch(step, i, d) for d in range(2) for i in range(MICRO)]
        loss = torch.stack([common.cross_entropy(model(x), y) for x, y in pairs]).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    for rank, results in enumerate(got):
        for run, (got_losses, got_norms, weights) in zip(runs, results, strict=True):
            assert got_losses == pytest.approx(losses, rel=2e-6) and got_norms == pytest.approx(norms, rel=1e-5), (rank, run)
            if rank == 0:
                assert set(weights) == set(model.state_dict()), run
                for name, value in model.state_dict().items():
                    assert float((weights[name] - value).abs().max()) <= 2e-6, (run, name)
