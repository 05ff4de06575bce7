"""Activation checkpointing of both kinds, around any part of a model: every stage trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.versus_torch import Case, Where, check, run_cases

pytestmark = pytest.mark.ranks
D = 6


class LowRankBlock(nn.Module):
    """Frozen norm and linear, trainable low-rank pair."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(D).requires_grad_(False), nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (self.base(h) + self.b(self.a(h))).tanh()


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(D), nn.Linear(D, D)
        self.gain = nn.Parameter(torch.ones(D))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc(self.norm(x)).tanh()) * self.gain


class Stack(nn.Module):
    """`nested` checkpoints pairs of checkpointed blocks; `twice` runs every block two times."""

    def __init__(self, block: Any, mode: str, blocks: int = 3, nested: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(blocks)])
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.mode, self.nested, self.twice = mode, nested, twice

    def _again(self, fn: Any, x: Tensor) -> Tensor:
        return fn(x) if self.mode == "off" else checkpoint(fn, x, use_reentrant=self.mode == "reentrant")

    def _pair(self, first: nn.Module, x: Tensor) -> Tensor:
        return self._again(first, self._again(first, x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.nested:
                x = self._again(lambda h, block=block: self._pair(block, h), x)
            else:
                x = self._again(block, x)
                x = self._again(block, x) if self.twice else x
        return self.head(x)


class Whole(nn.Module):
    """The whole model inside one checkpointed region."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.inner, self.mode = Stack(Block, "off"), mode

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.mode == "reentrant")


def _square(model: nn.Module, where: Where) -> Tensor:
    return model(where.data(5, D).requires_grad_()).square().mean()


def _explicit(model: nn.Module, where: Where) -> tuple[float]:
    """backward with a gradient of the output's shape."""
    out = model(where.data(5, D).requires_grad_())
    out.backward(gradient=where.data(5, D).flip(0))
    return (float(out.detach().sum()),)


def _from_outside(model: nn.Module, where: Where) -> Tensor:
    """The engine itself inside a checkpointed region."""
    return checkpoint(model, where.data(5, D).requires_grad_(), use_reentrant=where.micro == 0).square().mean()


MODES = ("reentrant", "non-reentrant")
CASES = [
    *(Case(f"{m} frozen", lambda m=m: Stack(LowRankBlock, m), _square, accumulation=2) for m in MODES),
    *(Case(f"{m} twice", lambda m=m: Stack(Block, m, twice=True), _square, accumulation=2) for m in MODES),
    *(Case(f"{m} nested", lambda m=m: Stack(Block, m, blocks=2, nested=True), _square) for m in MODES),
    *(Case(f"{m} dropout", lambda m=m: Stack(lambda: Block(0.5), m), _square) for m in MODES),
    *(Case(f"{m} explicit", lambda m=m: Stack(Block, m), _explicit, steps=3, tolerance=3e-6) for m in MODES),
    *(Case(f"{m} whole", lambda m=m: Whole(m), _square) for m in MODES),
    Case("engine in a region", lambda: Stack(Block, "off"), _from_outside, accumulation=2),
    *(Case(f"{m} no prefetch", lambda m=m: Stack(Block, m), _square, zero={"stage3_prefetch_bucket_size": 0},
           stages=(3,)) for m in MODES),
]  # fmt: skip


def _job(rank: int, ranks: int) -> list[str]:
    return run_cases(rank, ranks, CASES)


def test_checkpointing() -> None:
    check(_job)
