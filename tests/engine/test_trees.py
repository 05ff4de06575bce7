"""Random small trees of modules (shared, nested, frozen, odd sizes, empty) at every stage: one process is what they equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine.versus_torch import TINY, Case, Where, run_cases
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
WIDTH = 5
TREES = 20  # in one launch
KINDS = {"linear", "tied", "same", "scale", "norm", "empty", "unused", "nested"}


@dataclass(frozen=True)
class Tree:
    """A leaf has a kind; `again` is how often its module runs; `of` is the place of an earlier leaf whose module (or, for a tied
    weight, whose weight) it is."""

    kind: str  # "linear" | "tied" | "same" | "scale" | "norm" | "empty" | "unused" | "nested"
    size: int = 3
    again: int = 1
    frozen: bool = False
    of: int = 0
    parts: tuple[Tree, ...] = ()


LEAVES = st.builds(
    Tree, kind=st.sampled_from(["linear", "tied", "same", "scale", "norm", "empty", "unused"]), size=st.integers(1, 9),
    again=st.integers(1, 3), frozen=st.booleans(), of=st.integers(0, 3),
)  # fmt: skip
TREE = st.recursive(
    LEAVES, lambda inner: st.builds(Tree, kind=st.just("nested"), again=st.integers(1, 2), parts=st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)  # fmt: skip


class Mix(nn.Module):
    """Through an odd width and back."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.by, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by + self.none.sum()


class Node(nn.Module):
    def __init__(self, tree: Tree, earlier: list[nn.Module]) -> None:
        super().__init__()
        self.tree = tree
        self.parts = nn.ModuleList(Node(part, earlier) for part in tree.parts)
        self.inner: nn.Module = nn.Identity()
        known = earlier[tree.of % len(earlier)] if earlier else None
        if tree.kind == "same" and known is not None:
            self.inner = known
        elif tree.kind in ("linear", "same", "tied", "unused"):
            self.inner = Mix(tree.size)
            if tree.kind == "tied" and isinstance(known, Mix):
                self.inner = Mix(known.up.out_features)
                self.inner.up.weight = known.up.weight
        elif tree.kind == "scale":
            self.inner = Scale(tree.size)
        elif tree.kind == "norm":
            self.inner = nn.LayerNorm(WIDTH)
        if tree.kind not in ("nested", "empty", "unused"):
            earlier.append(self.inner)
        if tree.frozen and tree.kind not in ("same", "tied"):
            self.inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.tree.again):
            if self.tree.kind != "unused":
                x = self.inner(x)
            for part in self.parts:
                x = part(x)
        return x


class Root(nn.Module):
    """Something to train in any case, and an end that keeps numbers small."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(WIDTH, WIDTH), Node(tree, []), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)).tanh())


def loss_of(model: nn.Module, where: Where) -> Tensor:
    return model(where.data(3, WIDTH)).square().mean()


def _train(rank: int, ranks: int, trees: list[Tree]) -> list[str]:
    """One line for each fault, with the tree."""
    cases = []
    for i, tree in enumerate(trees):
        buckets = (TINY,) if i % 3 else (None,)
        cases.append(Case(repr(tree), lambda t=tree: Root(t), loss_of, accumulation=1 + i % 2, tolerance=3e-6, buckets=buckets))
    return run_cases(rank, ranks, cases)


def faults_of(trees: list[Tree], ranks: int) -> list[str]:
    return [line for found in run_ranks(_train, ranks, trees, timeout=200) for line in found]


def drawn(seed: int) -> list[Tree]:
    """Different trees, of all kinds of leaves; the same for a seed."""
    import random

    chosen: list[Tree] = []
    rules: Any = settings(max_examples=400, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))

    def keep(tree: Tree) -> bool:
        if tree not in chosen:
            chosen.append(tree)
        return len(chosen) >= TREES and {leaf.kind for each in chosen for leaf in walk(each)} == KINDS

    find(TREE, keep, settings=rules, random=random.Random(seed))
    return chosen


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_trees(ranks: int) -> None:
    faults = faults_of(drawn(ranks), ranks)
    assert not faults, "\n" + "\n".join(faults[:10])


def walk(tree: Tree) -> list[Tree]:
    return [tree, *(leaf for part in tree.parts for leaf in walk(part))]
