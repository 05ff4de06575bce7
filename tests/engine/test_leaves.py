"""Modules of which each rank runs other parts, at stage 3 with a bucket for every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.engine.versus_torch import TINY, Where, check, difference, fresh, one_mesh, whole_weights
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, DivergenceError, ModelError
from zeroengine.utils import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules, z3_leaf_module
from zeroengine.zero.leaves import find_leaves

D = 6


class Routed(nn.Module):
    """A block whose parts are chosen by `chosen`; the name of the list is what finds it by default."""

    def __init__(self, attribute: str, recompute: bool = False) -> None:
        super().__init__()
        self.attribute, self.recompute = attribute, recompute
        self.gate = nn.Linear(D, D)
        setattr(self, attribute, nn.ModuleList([nn.Linear(D, D) for _ in range(4)]))

    def run(self, x: Tensor, chosen: list[int]) -> Tensor:
        out = self.gate(x)
        for i in chosen:
            out = out + getattr(self, self.attribute)[i](x).tanh()
        return out

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return checkpoint(self.run, x, chosen, use_reentrant=False) if self.recompute else self.run(x, chosen)


class Model(nn.Module):
    def __init__(self, attribute: str = "experts", recompute: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.blocks = nn.ModuleList([Routed(attribute, recompute) for _ in range(2)])

    def forward(self, x: Tensor, chosen: list[list[int]]) -> Tensor:
        x = self.first(x)
        for block, row in zip(self.blocks, chosen, strict=True):
            x = block(x, row).tanh()
        return self.last(x)


# chosen[step][rank][block]
CHOSEN = [
    [[[0, 1], [2]], [[2, 3], [0, 3, 1]]],
    [[[3], []], [[], [1]]],
    [[[], []], [[0, 1, 2, 3], [2]]],
    [[[1, 0], [2]], [[1, 0], [2, 0]]],
]


def config(**zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "bucket_size": TINY, **zero},
    }


def by_name(model: nn.Module) -> dict[str, Any]:
    return {}


def by_mark(model: nn.Module) -> dict[str, Any]:
    set_z3_leaf_modules(model, [Routed])
    return {}


def by_class(model: nn.Module) -> dict[str, Any]:
    return {"leaf_module": {"classes": ["Routed"]}}


def by_path(model: nn.Module) -> dict[str, Any]:
    return {"leaf_module": {"names": ["blocks.0"], "name_suffixes": [".1"]}}


WAYS: list[tuple[str, bool, Callable[[nn.Module], dict[str, Any]]]] = [
    ("experts", False, by_name), ("experts", True, by_name), ("parts", False, by_mark), ("parts", True, by_class),
    ("parts", False, by_path),
]  # fmt: skip


def _equal(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for attribute, recompute, way in WAYS:
        model = fresh(lambda: Model(attribute, recompute))  # noqa: B023
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, rows in enumerate(CHOSEN):
            for r in range(ranks):
                (model(Where(step, 0, r, ranks).data(5, D), rows[r]).square().mean() / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = {n: p.detach() for n, p in model.named_parameters()}
        mine = fresh(lambda: Model(attribute, recompute))  # noqa: B023
        engine = zeroengine.initialize(model=mine, config=config(**way(mine)), mesh=mesh)[0]
        for step, rows in enumerate(CHOSEN):
            with torch.no_grad():
                engine(Where(step, 0, rank, ranks).data(5, D), rows[rank])
            engine.backward(engine(Where(step, 0, rank, ranks).data(5, D), rows[rank]).square().mean())
            engine.step()
        worst, who = difference(whole_weights(engine), expected)
        if not worst <= 2e-6:
            faults.append(f"{attribute} {recompute} {way.__name__}: weights differ by {worst:.2e} in {who}")
        engine.destroy()
    return faults


@pytest.mark.ranks
def test_ranks_that_run_other_parts() -> None:
    check(_equal)


def _unmarked(rank: int, ranks: int) -> str:
    model = fresh(lambda: Model("parts"))
    engine = zeroengine.initialize(model=model, config=config(), mesh=one_mesh())[0]
    try:
        set_z3_leaf_modules(model, [Routed])
    except ModelError:
        pass
    else:
        return "a mark that comes too late was accepted"
    try:
        engine(Where(0, 0, rank, ranks).data(5, D), CHOSEN[0][rank])
    except DivergenceError as error:
        return str(error)
    return "accepted"


@pytest.mark.ranks
def test_the_error_names_the_remedy() -> None:
    for told in run_ranks(_unmarked, 2, timeout=60):
        assert "set_z3_leaf_modules" in told and "leaf_module" in told and "parts.0" in told and "parts.2" in told, told


def test_marks() -> None:
    model = Model("parts")
    assert set_z3_leaf_modules(model, ["Routed"]) == list(model.blocks) == get_z3_leaf_modules(model)
    assert z3_leaf_module(model.blocks[0]) and list(find_leaves(model)) == ["blocks.0", "blocks.1"]
    assert len(unset_z3_leaf_modules(model, [Routed])) == 2 and not find_leaves(model)
    with pytest.raises(ModelError, match="Conv2d"):
        set_z3_leaf_modules(model, [nn.Conv2d])
    assert set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    with pytest.raises(ConfigError, match=r"blocks\.7"):
        find_leaves(model, {"names": ["blocks.7"]})
    with pytest.raises(ConfigError, match="clases"):
        find_leaves(model, {"clases": ["Routed"]})
    assert list(find_leaves(Model())) == ["blocks.0", "blocks.1"]
