"""Stages against each other over twenty steps; sums in place of means; what frozen parameters cost; edits that last."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.engine.versus_torch import STAGES, TINY, Where, clean, difference, fresh, one_mesh, run_jobs, whole_weights
from tests.ranks import run_ranks
from zeroengine.errors import DivergenceError
from zeroengine.utils import safe_get_full_fp32_param, set_z3_leaf_modules
from zeroengine.zero import GatheredParameters
from zeroengine.zero.bucket import Residency

pytestmark = pytest.mark.ranks
D = 6
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def make(mesh: Any, stage: int, build: Any, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": SGD,
        "zero_optimization": {"stage": stage, "bucket_size": TINY, **(zero or {})}, **config,
    }  # fmt: skip
    model = build if isinstance(build, nn.Module) else fresh(build)
    return zeroengine.initialize(model=model, config=settings, mesh=mesh)[0]


# --- stages against each other -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Tied ends, and a layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.idle = nn.Embedding(7, D), nn.Linear(D, D), nn.Linear(D, D)
        self.head = nn.Linear(D, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mid(self.embed(ids)).tanh()).flatten(0, 1), ids.flatten())


def ids_of(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(7, (2, 3), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def _agree(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for accumulation, clip in product((1, 4), (0.0, 0.05)):
        expected: dict[str, Tensor] = {}
        losses: list[float] = []
        for stage in STAGES:
            engine = make(mesh, stage, Tied, gradient_accumulation_steps=accumulation, gradient_clipping=clip)
            seen = []
            for step in range(20):
                for micro in range(accumulation):
                    loss = engine(ids_of(step, micro, rank))
                    engine.backward(loss)
                    engine.step()
                    seen.append(float(loss.detach()))
                if clip and not engine.was_step_clipped():
                    faults.append(f"stage {stage}: step {step} is not clipped at {engine.get_global_grad_norm()}")
            got = whole_weights(engine)
            if not stage:
                expected, losses = got, seen
            worst, who = difference(got, expected)
            spread = max(abs(a - b) for a, b in zip(seen, losses, strict=True))
            if not (worst <= 1e-6 and spread <= 1e-6):
                faults.append(f"x{accumulation}, clip {clip}: stage {stage} and 0 differ by {worst:.1e} in {who}, losses by {spread:.1e}")
            engine.destroy()
    return faults


def test_stages_agree_over_twenty_steps(found: list[dict[str, Any]]) -> None:
    clean(found, _agree)


# --- sums --------------------------------------------------------------------------------------------------------------


class _Everybodys(torch.autograd.Function):
    """All ranks' rows; in backward each rank's own part of the gradient, as contrastive losses do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4))


def contrast(rows: Tensor) -> Tensor:
    a, b = rows.unflatten(0, (-1, 2)).unbind(1)
    return F.cross_entropy(a @ b.t(), torch.arange(len(a)))


def _contrastive(rank: int, ranks: int) -> list[str]:
    """The loss of all ranks' embeddings, equal everywhere: each rank has the gradient of its rows, and they are summed."""
    mesh, faults = one_mesh(), []
    model = fresh(encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(3):
        contrast(model(torch.cat([Where(step, 0, r, ranks).data(4, D) for r in range(ranks)]))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        engine = make(mesh, stage, encoder, gradient_reduction="sum", gradient_clipping=0.1)
        seen = []
        for step in range(3):
            engine.backward(contrast(_Everybodys.apply(engine(Where(step, 0, rank, ranks).data(4, D)))))
            engine.step()
            seen.append(engine.get_global_grad_norm())
        worst, who = difference(whole_weights(engine), {n: p.detach() for n, p in model.named_parameters()})
        if not worst <= 2e-6 or any(abs(a - b) > 1e-5 * b for a, b in zip(seen, norms, strict=True)):
            faults.append(f"stage {stage}: {who} differs by {worst:.1e}, norms {seen} instead of {norms}")
        engine.destroy()
    return faults


def test_a_loss_over_the_embeddings_of_all_ranks(found: list[dict[str, Any]]) -> None:
    clean(found, _contrastive)


# --- frozen parameters -------------------------------------------------------------------------------------------------


def _frozen(rank: int, ranks: int) -> list[str]:
    """One trainable element in a thousand: gradients, masters and state are of that size."""
    mesh, faults = one_mesh(), []

    def build() -> nn.Module:
        base = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).requires_grad_(False)
        return nn.Sequential(base, nn.Linear(32, 1, bias=False))

    for stage in STAGES:
        for config in ({}, {"bf16": {"enabled": True}}):
            engine = make(mesh, stage, build, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **config)
            engine.backward(engine(torch.ones(2, 32)).float().square().mean())
            held, trainable = engine.memory_report(), 32
            if held["gradients"] > 4 * trainable + 64 or not held["gradients"]:
                faults.append(f"stage {stage} {config}: {held}")
            engine.step()
            held = engine.memory_report()
            if held["optimizer"] > 12 * trainable + 64 or not held["optimizer"]:
                faults.append(f"stage {stage} {config}: {held}")
            if {len(engine.optimizer.state), len(engine.optimizer.param_groups[0]["params"])} - {0, 1}:
                faults.append(f"stage {stage}: state of {len(engine.optimizer.state)} parameters")
            engine.destroy()
    return faults


def test_frozen_parameters_cost_no_gradients_and_no_state(found: list[dict[str, Any]]) -> None:
    clean(found, _frozen)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(32).requires_grad_(False), nn.Linear(32, 32).requires_grad_(False)
        self.a, self.b = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (self.base(h) + self.b(self.a(h))).tanh()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LowRank() for _ in range(6))
        self.look: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self._seen, block, x, use_reentrant=False)
        return x

    def _seen(self, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        self.look()
        return x


def _per_block(rank: int, ranks: int) -> list[str]:
    """Frozen weights in blocks that are computed again: what is gathered at a time is of a block or two."""
    engine, faults = make(one_mesh(), 3, Recomputed, {"bucket_size": 2000}), []
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(b.layout.numel for b in engine.mechanism.buckets if b.residency is not Residency.RELEASED))

    engine.module.look = look
    for block in engine.module.blocks:
        block.register_full_backward_hook(look)
    one = sum(p.numel() for p in engine.module.blocks[0].parameters())
    for step in range(3):
        most = 0
        engine.backward(engine(Where(step, 0, rank, ranks).data(3, 32).requires_grad_()).square().mean())
        engine.step()
        if not one // 2 < most <= 2.5 * one:
            faults.append(f"step {step}: {most} elements gathered at a time, and a block has {one}")
    return faults


def test_recomputed_blocks_with_frozen_weights_are_gathered_one_by_one(found: list[dict[str, Any]]) -> None:
    clean(found, _per_block)


def _resident(rank: int, ranks: int) -> list[str]:
    """Biases that stay whole are never gathered in forward and backward, from the first step on, beside a block that is one unit."""
    mesh, faults = one_mesh(), []
    model = fresh(lambda: nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))))
    set_z3_leaf_modules(model, [nn.Sequential])
    engine = make(mesh, 3, model, {"stage3_param_persistence_threshold": D + 1})
    whole = [b for b in engine.mechanism.buckets if not b.policy.shard_params]
    if {s.name for b in whole for s in b.layout.specs} != {"0.bias", "1.0.bias", "1.1.bias"}:
        faults.append(f"whole: {[b.subject for b in whole]}")
    gathered: list[str] = []
    for b in whole:
        b.gather = lambda b=b: gathered.append(b.subject)
    for step in range(3):
        engine.backward(engine(Where(step, 0, rank, ranks).data(3, D)).square().mean())
        if gathered:
            faults.append(f"step {step}: {gathered} gathered")
        engine.step()
    return faults


def test_resident_parameters_are_not_gathered_beside_a_unit(found: list[dict[str, Any]]) -> None:
    clean(found, _resident)


# --- edits -------------------------------------------------------------------------------------------------------------


def _edits(rank: int, ranks: int) -> list[str]:
    """1 is added to a weight inside a gather, by one rank that is named or by all alike: shards and masters have it for good. Unlike
    edits that nobody is named for are an error on every rank, and leave nothing."""
    mesh, faults = one_mesh(), []
    for stage in STAGES:
        for config in ({}, {"bf16": {"enabled": True}}):
            for writer in (None, 0, ranks - 1):
                engine = make(mesh, stage, encoder, optimizer={"type": "SGD", "params": {"lr": 0.0}}, **config)
                weight = engine.module[0].weight
                before = whole_weights(engine)["0.weight"]
                with GatheredParameters(weight, modifier_rank=writer), torch.no_grad():
                    if writer in (None, rank):
                        weight.add_(1.0)
                want = (before.float() + 1).to(before.dtype)
                for when in ("at once", "after a step"):
                    with GatheredParameters([weight]):
                        if not torch.equal(weight.detach(), want):
                            faults.append(f"stage {stage} {config} writer {writer} {when}: the weight")
                    master = safe_get_full_fp32_param(weight)
                    if not torch.equal(master.to(before.dtype), want):
                        faults.append(f"stage {stage} {config} writer {writer} {when}: the master")
                    engine.backward(engine(torch.ones(2, D)).float().mean())
                    engine.step()
                try:
                    with GatheredParameters(weight), torch.no_grad():
                        weight.add_(float(rank))
                    faults.append(f"stage {stage}: unlike edits were accepted")
                except DivergenceError as error:
                    if "0.weight" not in str(error) or "modifier_rank" not in str(error):
                        faults.append(str(error))
                engine.destroy()
    return faults


def test_edits_inside_a_gather_last(found: list[dict[str, Any]]) -> None:
    clean(found, _edits)


# --- one rank fails ----------------------------------------------------------------------------------------------------


def _fails(rank: int, ranks: int, where: str, folder: str) -> None:
    engine = make(one_mesh(), 3, encoder)
    for step in range(3):
        if step == 1 and rank == 1 and where == "forward":
            engine.module[1].register_forward_pre_hook(lambda m, a: (_ for _ in ()).throw(ValueError("a fault of the user's own")))
        if step == 1 and rank == 1 and where == "loader":
            raise ValueError("a fault of the user's own")
        engine.backward(engine(Where(step, 0, rank, ranks).data(3, D)).square().mean())
        engine.step()
        if where == "save":
            if step == 1 and rank == 1:
                raise ValueError("a fault of the user's own")
            engine.save_checkpoint(folder)


@pytest.mark.parametrize("where", ["forward", "loader", "save"])
def test_one_rank_fails_and_all_say_what_they_waited_for(where: str, tmp_path: Any) -> None:
    outcomes = run_ranks(_fails, 3, where, str(tmp_path), timeout=60, failures=True)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error and "did not end" not in outcome.error, f"rank {rank}: {outcome}"
        assert outcome.seconds - outcomes[1].seconds < 10
        if rank == 1:
            assert "a fault of the user's own" in outcome.error
        else:
            waited = {"forward": "all_gather '2.bias'", "loader": "all_gather '0.weight'", "save": "agreeing on the checkpoint's tag"}[
                where
            ]
            assert waited in outcome.error, outcome.error
            assert ("another rank died" if where == "save" else "rank 1") in outcome.error, outcome.error


JOBS = [_agree, _contrastive, _frozen, _per_block, _resident, _edits]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """All of it, in one launch of ranks."""
    return run_ranks(run_jobs, 2, JOBS, timeout=240)
