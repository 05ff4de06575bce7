"""A language model as a list of layers that may share layers and sequences, and its batches; imports no transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroengine.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroengine.pipeline.module import PipelineModule
from zeroengine.sequence.shared import shared_attention, token_positions

STEPS, MICRO, BATCH, VOCABULARY = 3, 2, 2, 64
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5}}


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "bucket_size": 3000, "stage3_param_persistence_threshold": 0, **changes.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": MICRO, "optimizer": OPTIMIZER,
        "gradient_clipping": 0.5, "zero_optimization": zero, "steps_per_print": None, "health": {"comm_timeout": 30}, **changes,
    }  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(shared_attention(self, q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.dropout = Attention(), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        return x + self.mlp(self.between(x))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.places(token_positions(self, x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(16), nn.Embedding(VOCABULARY, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.tokens.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def count(targets: Tensor) -> int:
    return int((targets != -100).sum())


def listed(stages: int, **options: Any) -> PipelineModule:
    dropout = options.pop("dropout", 0.0)
    tie = {"tied_weight_attr": "tokens.weight"}
    layers = [TiedLayerSpec("t", Embedding, **tie), *[LayerSpec(Block, dropout) for _ in range(4)], TiedLayerSpec("t", Head, **tie)]
    return PipelineModule(layers, stages, cross_entropy, partition_method="uniform", loss_weight=count, **options)


def listed_batch(step: int, micro: int, group: int) -> tuple[Tensor, Tensor]:
    given = batch(step, micro, group)
    return given["input_ids"], F.pad(given["labels"], (0, 1), value=-100)[:, 1:]


def batch(step: int, micro: int, group: int) -> dict[str, Tensor]:
    """Lengths differ and divide nothing; not as many targets in each."""
    generator = torch.Generator().manual_seed(100 * step + 10 * group + micro)
    ids = torch.randint(0, VOCABULARY, (BATCH, 13 + 4 * micro), generator=generator)
    labels = ids.clone()
    labels[0, : 3 + 2 * group + micro] = -100
    return {"input_ids": ids, "labels": labels}


Result = tuple[list[float], list[float], dict[str, Tensor] | None]


def reference(model: Any, groups: int, logits_of: Any, steps: int = STEPS, micros: int = MICRO) -> Result:
    """Losses, norms and weights of one process on the batches of all data-parallel groups. `logits_of(batch)`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses, norms = [], []
    for step in range(steps):
        parts, counts = [], []
        for group in range(groups):
            for micro in range(micros):
                given = batch(step, micro, group)
                y = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
                parts.append(F.cross_entropy(logits_of(given["input_ids"]).flatten(0, 1), y.flatten(), reduction="sum"))
                counts.append(count(y))
        loss = torch.stack(parts).sum() / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: v.detach().clone() for n, v in model.state_dict().items()}


def data(engine: Any, kind: str, step: int) -> Iterator[Any]:
    make = listed_batch if kind == "list" else batch
    return iter([make(step, i, engine.mesh.sample_group) for i in range(engine.gradient_accumulation_steps())])


def run(engine: Any, kind: str) -> Result:
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(data(engine, kind, step))))
        norms.append(engine.get_global_grad_norm())
    engine.check_replicas()
    weights = engine.full_state_dict()
    engine.destroy()
    return losses, norms, weights


def compare(results: list[Result], want: Result) -> None:
    import pytest

    losses, norms, weights = want
    assert weights is not None
    for rank, (got_losses, got_norms, got) in enumerate(results):
        assert got_losses == pytest.approx(losses, rel=1e-5), rank
        assert got_norms == pytest.approx(norms, rel=1e-4), rank
        assert (got is None) == (rank > 0)
    got = results[0][2]
    assert got is not None and set(got) == set(weights)
    for name, value in weights.items():
        assert torch.allclose(got[name], value, rtol=1e-4, atol=2e-5), (name, float((got[name] - value).abs().max()))
