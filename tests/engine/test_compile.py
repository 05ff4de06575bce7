"""torch.compile of a model's blocks at every stage: the same numbers, no graph breaks, and no graph for every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroengine
from tests.engine.versus_torch import TINY, Where, check, difference, fresh, one_mesh, whole_weights
from zeroengine.errors import ModelError

pytestmark = pytest.mark.ranks
D = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), Block(), Block(), Block(), nn.Linear(D, D))


def _before(model: nn.Module) -> None:
    for block in model[1:4]:  # type: ignore[index]
        block.compile(backend="aot_eager")


def _wrapped(model: nn.Module) -> None:
    for i in (1, 2, 3):
        model[i] = torch.compile(model[i], backend="aot_eager")  # type: ignore[index, operator]


def _nothing(model: nn.Module) -> None:
    pass


# how the blocks are compiled before the engine is made, and after it
WAYS = {"compile() before": (_before, _nothing), "compile() after": (_nothing, _before), "torch.compile": (_wrapped, _nothing)}


def _train(mesh: Any, stage: int, rank: int, ranks: int, before: Any, after: Any, bucket: int | None = TINY) -> dict[str, Tensor]:
    """Five steps, with an evaluation after each."""
    model = fresh(blocks)
    before(model)
    zero = {"stage": stage, **({"bucket_size": bucket} if bucket else {})}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": zero}
    engine = zeroengine.initialize(model=model, config=config, mesh=mesh)[0]
    after(engine.module)
    for step in range(5):
        engine.train()
        engine.backward(engine(Where(step, 0, rank, ranks).data(3, D)).square().mean())
        engine.step()
        engine.eval()
        with torch.no_grad():
            engine(Where(step, 0, rank, ranks).data(3, D))
    weights = {n.replace("_orig_mod.", ""): w for n, w in whole_weights(engine).items()}
    engine.destroy()
    x = torch.ones(2, D)
    if not torch.equal(model(x), fresh_with(weights)(x)):
        raise AssertionError("the module that is given back computes something else")
    return weights


def fresh_with(weights: dict[str, Tensor]) -> nn.Module:
    model = fresh(blocks)
    model.load_state_dict(weights)
    return model


def _compiled(rank: int, ranks: int) -> list[str]:
    from torch._dynamo.utils import counters

    mesh, faults = one_mesh(), []
    for stage in (1, 3):
        plain = _train(mesh, stage, rank, ranks, _nothing, _nothing)
        for way, (before, after) in WAYS.items() if stage == 3 else list(WAYS.items())[:1]:
            torch._dynamo.reset()
            counters.clear()
            worst, who = difference(_train(mesh, stage, rank, ranks, before, after), plain)
            if not worst <= 1e-6:
                faults.append(f"{way}, stage {stage}: {who} differs by {worst:.2e}")
            graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
            # one with gradients and one without, for each class of blocks (each block, where it was wrapped by itself)
            if not 2 <= graphs <= (6 if way == "torch.compile" else 3) or (stage == 3 and breaks):
                faults.append(f"{way}, stage {stage}: {graphs} graphs, breaks {breaks}")
    return faults


def test_compiled_blocks_train_as_plain_ones() -> None:
    check(_compiled)


def _whole(rank: int, ranks: int) -> list[str]:
    """At stage 3 the model as a whole is refused early; below it, it trains as a plain one."""
    mesh, faults = one_mesh(), []

    def whole(model: nn.Module) -> None:
        model.compile(backend="aot_eager")

    worst, who = difference(_train(mesh, 1, rank, ranks, whole, _nothing), _train(mesh, 1, rank, ranks, _nothing, _nothing))
    if not worst <= 1e-6:
        faults.append(f"stage 1: {who} differs by {worst:.2e}")
    try:
        _train(mesh, 3, rank, ranks, whole, _nothing)
        faults.append("accepted")
    except ModelError as error:
        if "block.compile()" not in str(error):
            faults.append(str(error))
    return faults


def test_a_whole_model_that_is_compiled() -> None:
    check(_whole)
