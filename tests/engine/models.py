"""Small models and data that the engine's tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 11


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, blocks, head (tied unless said otherwise); odd width, so that nothing divides evenly."""

    def __init__(self, width: int = 17, blocks: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


def tokens(step: int, micro: int, rank: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """The micro-batch of one rank: every one different, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randint(0, VOCABULARY, (batch, 5), generator=generator)
    return x, (x * 3 + 1) % VOCABULARY


def config(stage: int, **changes: Any) -> dict[str, Any]:
    """A configuration of several buckets for the models here; `changes` replace or, for dicts, extend its keys."""
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "bucket_size": 700},
        "steps_per_print": None,
    }
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict) and key != "optimizer":
            base[key] = {**base[key], **value}
        else:
            base[key] = value
    return base
