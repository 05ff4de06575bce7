"""A small causal model whose blocks have attention and our own mixture of experts, for ranks that split layers and sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, LENGTH, ROWS = 16, 4, 24, 7, 4


@dataclass(frozen=True)
class Split:
    """`kind`: of the experts. `mesh`: degrees. `sp`: sequences are split outside of the layers."""

    kind: str = "bank"
    mesh: dict[str, int] = field(default_factory=dict)
    sp: bool = False
    stage: int = 1
    layer: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def _two_layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, case: Split) -> None:
        super().__init__()
        from zeroengine.moe import ExpertBank, MoE

        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        expert: Any = _two_layers(12) if case.kind == "list" else ExpertBank(4, WIDTH, 12)
        if case.kind == "gelu":
            expert = ExpertBank(4, WIDTH, 12, "gelu", gated=False, bias=True)
        options = {"drop_tokens": False, "k": 2, "shared": _two_layers(8), **case.layer}
        self.moe = MoE(WIDTH, expert, num_experts=4, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        out, aux, _ = self.moe(self.norm2(x))
        return x + out, aux


class Model(nn.Module):
    def __init__(self, case: Split) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        routers = x.new_zeros(())
        for block in self.blocks:
            x, aux = block(x)
            routers = routers + aux
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + 0.1 * routers


def build(case: Split) -> Model:
    torch.manual_seed(3)
    return Model(case)


def batch(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(70 + step))


def train(rank: int, world: int, cases: list[Split], steps: int = 3) -> list[dict[str, Any]]:
    import zeroengine

    found = []
    for case in cases:
        config = {
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "gradient_clipping": 0.5,
            "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0}, "mesh": case.mesh, "steps_per_print": None,
            "tensor_parallel": {"sequence_parallel": case.sp, "check_replicas_every": 1}, **case.config,
        }  # fmt: skip
        engine, *_ = zeroengine.initialize(model=build(case), config=config)
        losses, norms = [], []
        for step in range(steps):
            mine = batch(step).chunk(engine.mesh.sample_groups)[engine.mesh.sample_group]
            loss = engine(mine)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            norms.append(engine.get_global_grad_norm())
        held = sum(p.numel() for n, p in engine.module.named_parameters() if "experts" in n)
        whole = engine.full_state_dict()
        engine.destroy()
        back = {n: v.clone() for n, v in engine.module.state_dict().items()}
        found.append({"losses": losses, "norms": norms, "whole": whole, "back": back, "held": held})
    return found


def reference(case: Split, steps: int = 3) -> dict[str, Any]:
    """The same in this process, by plain torch."""
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    for step in range(steps):
        loss = model(batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}
