"""A small language model as a list of layers, its batches, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.models import VOCABULARY, Block
from zeroengine.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroengine.pipeline.module import PipelineModule

WIDTH = 8


def head(module: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def targets(labels: Tensor) -> int:
    return int((labels != -100).sum())


def layers(blocks: int = 6, dropout: float = 0.0) -> list[Any]:
    return [
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH),
        *[LayerSpec(Block, WIDTH) for _ in range(blocks)],
        LayerSpec(nn.Dropout, dropout),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head),
    ]


def module(num_stages: int = 1, **options: Any) -> PipelineModule:
    blocks, dropout = options.pop("blocks", 6), options.pop("dropout", 0.0)
    return PipelineModule(layers(blocks, dropout), num_stages, cross_entropy, partition_method="uniform", **options)


def batch(step: int, micro: int, data_rank: int, ragged: bool = False) -> tuple[Tensor, Tensor]:
    """The micro-batch of one data-parallel rank. `ragged`: of another length each, some labels ignored."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + data_rank)
    x = torch.randint(0, VOCABULARY, (2, 3 + (micro % 3 if ragged else 0)), generator=generator)
    y = (x * 3 + 1) % VOCABULARY
    if ragged:
        y[torch.rand(y.shape, generator=generator) < 0.3 + 0.2 * data_rank] = -100
    return x, y


def batches(step: int, count: int, data_rank: int, ragged: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    return iter([batch(step, i, data_rank, ragged) for i in range(count)])


def single(
    micro: int, data_ranks: int, steps: int = 2, weighted: bool = False, clip: float = 0.0
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, weights and gradient norms of plain PyTorch on the same global batches."""
    model = module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(steps):
        pairs = [batch(step, i, d, weighted) for d in range(data_ranks) for i in range(micro)]
        counts = [targets(y) if weighted else 1 for _, y in pairs]
        parts = [cross_entropy(model(x), y) * n / sum(counts) for (x, y), n in zip(pairs, counts, strict=True) if n]
        loss = torch.stack(parts).sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip else float("inf"))))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: v.detach().clone() for n, v in model.state_dict().items()}, norms


def config(stage: int, micro: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "bucket_size": 300, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **more,
    }
