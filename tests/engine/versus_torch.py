"""Compares training by the engine with the same mathematics in one process.

A `Case` is a model and the loss of one rank's micro-batch. The reference runs every rank's micro-batches one after another
on one copy of the model with plain torch and averages; the engine's ranks run their own.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zeroengine
from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.device import local_device
from zeroengine.logging import logger
from zeroengine.mesh import Mesh, build_mesh

STAGES = (0, 1, 2, 3)
TINY, DEFAULT = 24, None


@dataclass(frozen=True)
class Where:
    """Which micro-batch this is. `ranks` is the number of ranks."""

    step: int
    micro: int
    rank: int
    ranks: int

    def data(self, *shape: int) -> Tensor:
        """Numbers of this micro-batch alone."""
        g = torch.Generator().manual_seed(1000 * self.step + 100 * self.micro + self.rank)
        return torch.randn(*shape, generator=g)

    def same(self, *shape: int) -> Tensor:
        """Numbers that all ranks share."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(77_000 + 10 * self.step + self.micro))


Loss = Callable[[nn.Module, Where], Any]


@dataclass(frozen=True)
class Case:
    """`loss(model, where)` returns the loss, or runs backward itself and returns (detached loss,)."""

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    steps: int = 2
    accumulation: int = 1
    optimizer: dict[str, Any] = field(default_factory=lambda: {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}})
    tolerance: float = 1e-6
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    buckets: tuple[int | None, ...] = (TINY, DEFAULT)


def settings(case: Case, stage: int, bucket: int | None) -> dict[str, Any]:
    zero = {"stage": stage, **case.zero}
    if bucket is not None:
        zero["bucket_size"] = bucket
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": case.optimizer,
        "zero_optimization": zero,
        **case.config,
    }


def fresh(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def reference(case: Case, ranks: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """(losses [step][rank * micro], weights at the end)."""
    model = fresh(case.build)
    cls = getattr(torch.optim, case.optimizer["type"])
    optimizer = cls([p for p in model.parameters() if p.requires_grad], **case.optimizer["params"])
    history = []
    for step in range(case.steps):
        losses = []
        for rank in range(ranks):
            for micro in range(case.accumulation):
                torch.manual_seed(10_000 + 100 * step + 10 * micro + rank)
                loss = case.loss(model, Where(step, micro, rank, ranks))
                if isinstance(loss, tuple):
                    losses.append(float(loss[0]))
                    continue
                loss.backward()
                losses.append(float(loss.detach()))
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                p.grad.div_(ranks * case.accumulation)
        optimizer.step()
        optimizer.zero_grad()
        history.append(losses)
    return history, {n: t.detach().clone() for n, t in model.named_parameters()}


def train(case: Case, engine: Any, rank: int, ranks: int) -> list[list[float]]:
    history = []
    for step in range(case.steps):
        losses = []
        for micro in range(case.accumulation):
            torch.manual_seed(10_000 + 100 * step + 10 * micro + rank)
            loss = case.loss(engine, Where(step, micro, rank, ranks))
            if isinstance(loss, tuple):
                losses.append(float(loss[0]))
            else:
                engine.backward(loss)
                losses.append(float(loss.detach()))
            engine.step()
        history.append(losses)
    return history


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Every parameter's values, on every rank. Collective."""
    from zeroengine.engine.state import whole_parameters

    return {n: t.detach().clone() for n, t in whole_parameters(engine.module, engine.mechanism)}


def difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Largest difference relative to the largest weight of all, and whose it is."""
    if mine.keys() != theirs.keys():
        return float("inf"), f"other names: {sorted(mine.keys() ^ theirs.keys())}"
    scale = max((float(t.abs().max()) for t in theirs.values() if t.numel()), default=1.0)
    worst, who = 0.0, ""
    for name, t in theirs.items():
        if not t.numel():
            continue
        d = float((mine[name].double() - t.double()).abs().max()) / scale
        if not d <= worst:  # NaN counts
            worst, who = d, name
    return worst, who


def one_mesh() -> Mesh:
    """A mesh that all engines of a job share."""
    init_distributed(verbose=False)
    logger.setLevel("WARNING")
    device = local_device()
    return build_mesh(Fabric(device, timeout=30.0, stall_timeout=30.0))


def run_cases(rank: int, ranks: int, cases: Iterable[Case]) -> list[str]:
    """Faults found: one line each. An error ends the job, because the ranks are no longer in step."""
    mesh = one_mesh()
    faults: list[str] = []
    for case in cases:
        losses, weights = reference(case, ranks)
        mine = slice(rank * case.accumulation, (rank + 1) * case.accumulation)
        for stage in case.stages:
            for bucket in case.buckets:
                label = f"{case.name} stage {stage} bucket {bucket}"
                try:
                    model = fresh(case.build)
                    engine, *_ = zeroengine.initialize(model=model, config=settings(case, stage, bucket), mesh=mesh)
                    history = train(case, engine, rank, ranks)
                    got = whole_weights(engine)
                    engine.destroy()
                except Exception:
                    return [*faults, f"{label}: {traceback.format_exc()}"]
                expected = [row[mine] for row in losses]
                spread = max(abs(a - b) / (1 + abs(b)) for x, y in zip(history, expected, strict=True)
                             for a, b in zip(x, y, strict=True))  # fmt: skip
                if not spread <= max(case.tolerance, 2e-6):
                    faults.append(f"{label}: losses {history} instead of {expected}")
                worst, who = difference(got, weights)
                if not worst <= case.tolerance:
                    faults.append(f"{label}: weights differ by {worst:.2e} in {who}")
    return faults


def check(job: Callable[[int, int], list[str]], ranks: int = 2, timeout: float = 200.0) -> None:
    """Runs `job` on several ranks; each returns the faults it found."""
    faults = [f"rank {r}: {line}" for r, found in enumerate(run_ranks(job, ranks, timeout=timeout)) for line in found]
    assert not faults, "\n" + "\n".join(faults)


Job = Callable[[int, int], Any]


def run_jobs(rank: int, ranks: int, jobs: list[Job]) -> dict[str, Any]:
    """Several jobs in one launch of ranks: what each returned, by its name. After an exception, which is told as the one fault of its
    job, no other one is run: the ranks are no longer in step."""
    found: dict[str, Any] = {}
    for job in jobs:
        try:
            found[job.__name__] = job(rank, ranks)
        except Exception:
            found[job.__name__] = [traceback.format_exc()]
            break
    return found


def clean(results: list[dict[str, Any]], job: Job) -> None:
    """Asserts that a job found no fault on any rank."""
    faults = [f"rank {r}: {line}" for r, found in enumerate(results) for line in found.get(job.__name__, ["not reached"])]
    assert not faults, "\n" + "\n".join(faults)
