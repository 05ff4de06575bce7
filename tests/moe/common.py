"""A small model with a mixture of experts, trained on ranks and in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HIDDEN, EXPERTS, CLASSES = 8, 4, 5


@dataclass(frozen=True)
class Case:
    """What varies: the layer's options, the mesh, and how the tokens of each micro-batch are spread over ranks."""

    k: int = 2
    kind: str = "bank"  # or "list", "gelu", "all-to-one", "starved"
    ep: int = 1
    stage: int = 1
    dtype: str = "fp32"
    clip: float = 0.0
    optimizer: str = "SGD"
    accumulation: int = 1
    weights: tuple[int, ...] = (5, 5, 5, 5)  # tokens of each of four ranks
    experts: int = EXPERTS
    recompute: bool = False  # the layer's forward runs again in backward
    layer: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        from zeroengine.moe import ExpertBank
        from zeroengine.moe.layer import MoE

        self.inner = nn.Linear(HIDDEN, HIDDEN)
        expert: Any
        if case.kind == "list":
            expert = nn.Sequential(nn.Linear(HIDDEN, 12), nn.Tanh(), nn.Linear(12, HIDDEN))
        elif case.kind == "gelu":
            expert = ExpertBank(case.experts, HIDDEN, 12, "gelu", gated=False, bias=True)
        else:
            expert = ExpertBank(case.experts, HIDDEN, 12)
        options = {"drop_tokens": False, **case.layer}
        self.moe = MoE(HIDDEN, expert, num_experts=case.experts, k=case.k, **options)
        if case.kind == "list":
            for i in range(case.experts):
                for p in self.moe.sparse.experts.get_submodule(str(i)).parameters():
                    p.data.add_(torch.randn_like(p) * 0.1)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.recompute = case.recompute
        if case.kind in ("all-to-one", "starved"):
            with torch.no_grad():
                self.moe.sparse.router.weight.copy_(torch.randn(case.experts, HIDDEN) * 0.1)
                self.moe.sparse.router.weight[1] += 50.0 if case.kind == "all-to-one" else -50.0

    def forward(self, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        """The mean loss of the tokens; `share` makes means of ranks with unlike counts add up to the mean over all."""
        hidden = self.inner(x).abs() if self.moe.num_experts else x
        if self.recompute:
            out, aux, _ = checkpoint(self.moe, hidden, use_reentrant=False)
        else:
            out, aux, _ = self.moe(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden + out).float(), y, reduction="sum") * share
        return loss + 0.1 * aux


def build(case: Case) -> Net:
    torch.manual_seed(3)
    return Net(case)


def tokens(case: Case, step: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + 10 * step + micro)
    n = sum(case.weights)
    return torch.randn(n, HIDDEN, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def cut(case: Case, world: int, rank: int) -> slice:
    """The tokens of `rank`: several entries of `weights` each where there are fewer ranks."""
    each = len(case.weights) // world
    start = sum(case.weights[: rank * each])
    return slice(start, start + sum(case.weights[rank * each : (rank + 1) * each]))


def settings(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": case.optimizer, "params": {"lr": 0.05}},
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 600},
        "mesh": {"ep": case.ep},
        "steps_per_print": None,
        **case.config,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    return config


def train(rank: int, world: int, cases: list[Case], steps: int = 3) -> list[dict[str, Any]]:
    """Losses summed over ranks' shares, norms, gradients of the last step, and all weights at the end (on rank 0)."""
    import zeroengine
    from zeroengine.utils import safe_get_full_grad

    results = []
    for case in cases:
        engine, *_ = zeroengine.initialize(model=build(case), config=settings(case))
        losses, norms, grads = [], [], {}
        for step in range(steps):
            total = 0.0
            for micro in range(case.accumulation):
                x, y = tokens(case, step, micro)
                groups = engine.mesh.sample_groups
                mine = cut(case, groups, engine.mesh.sample_group)
                torch.manual_seed(step)
                share = torch.tensor(groups / len(x))
                loss = engine(x[mine], y[mine], share)
                engine.backward(loss)
                if step == steps - 1 and micro == case.accumulation - 1:
                    grads = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
                engine.step()
                total += float(loss.detach())
            losses.append(total)
            norms.append(engine.get_global_grad_norm())
        weights = engine.full_state_dict()
        engine.destroy()
        again = {n: v.clone() for n, v in engine.module.state_dict().items()}
        results.append({"losses": losses, "norms": norms, "grads": grads, "weights": weights, "given back": again})
    return results


def reference(case: Case, steps: int = 3) -> dict[str, Any]:
    """The same in this process, by plain torch."""
    model = build(case)
    dtype = {"fp32": torch.float32}.get(case.dtype, torch.float32)
    cls = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[case.optimizer]
    optimizer = cls(model.to(dtype).parameters(), lr=0.05)
    losses, norms = [], []
    grads: dict[str, Tensor] = {}
    for step in range(steps):
        total = 0.0
        for micro in range(case.accumulation):
            x, y = tokens(case, step, micro)
            torch.manual_seed(step)
            loss = model(x, y, torch.tensor(1 / len(x)))
            (loss / case.accumulation).backward()
            total += float(loss.detach())
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        router = model.moe.sparse.router
        router.move_bias(router.statistics.load)
        router.statistics.clear()
        losses.append(total)
    return {"losses": losses, "norms": norms, "grads": grads, "weights": model.state_dict()}


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12))
