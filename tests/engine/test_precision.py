"""16-bit training: what stays in fp32, what is said of numbers that are not finite, and how gradients are added up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.engine.versus_torch import DEFAULT, STAGES, TINY, Where, clean, difference, fresh, one_mesh, run_jobs, whole_weights
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, NonFiniteError
from zeroengine.logging import logger
from zeroengine.utils import safe_get_full_fp32_param, safe_get_full_grad

pytestmark = pytest.mark.ranks
D = 6
SGD = {"type": "SGD", "params": {"lr": 0.1}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64.0}}
TYPES: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": BF16, "float16": FP16}


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


def make(mesh: Any, stage: int, build: Any = mlp, bucket: int | None = TINY, **config: Any) -> Any:
    zero = {"stage": stage, **({"bucket_size": bucket} if bucket else {})}
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": zero, **config}
    return zeroengine.initialize(model=fresh(build), config=settings, mesh=mesh)[0]


# --- not finite --------------------------------------------------------------------------------------------------------


def _spoiled(rank: int, ranks: int) -> list[str]:
    """inf or NaN in one gradient of rank 1, five steps in a row: nothing moves, everybody knows, and it is said what and where."""
    mesh, faults, heard = one_mesh(), [], Heard()
    logger.addHandler(heard)
    for stage in STAGES:
        for name, config in TYPES.items():
            for kind in ("inf", "nan"):
                engine = make(mesh, stage, **config)
                schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
                engine.lr_scheduler = schedule
                before = whole_weights(engine)
                heard.lines.clear()
                spoil = [rank == 1]
                engine.module[2].bias.register_hook(lambda g: g * float(kind) if spoil[0] else g)  # noqa: B023
                for step in range(5):
                    engine.backward(engine(Where(step, 0, rank, ranks).data(3, D)).float().square().mean())
                    engine.step()
                    if engine.was_step_applied():
                        faults.append(f"{name} stage {stage}: applied")
                if difference(whole_weights(engine), before)[0] or engine.get_lr() != [0.1] or engine.skipped_steps != 5:
                    faults.append(f"{name} stage {stage}: {engine.get_lr()}, {engine.skipped_steps} skipped")
                said = [line for line in heard.lines if "step skipped" in line]
                wanted = [f"{'NaN' if kind == 'nan' else 'inf'} in the gradient of '2.bias'", name, "slice of rank"]
                if rank == 0 and not (len(said) == 3 and all(w in line for w in wanted for line in said)):
                    faults.append(f"{name} stage {stage} {kind}: {said}")
                if any(("loss scale" in line) != (name == "float16") or "overflow" in line for line in said):
                    faults.append(f"{name} stage {stage}: {said}")
                spoil[0] = False
                engine.backward(engine(Where(9, 0, rank, ranks).data(3, D)).float().square().mean())
                engine.step()
                if not engine.was_step_applied() or engine.get_lr() != [0.05]:
                    faults.append(f"{name} stage {stage}: the next good step was not taken")
                engine.destroy()
    return faults


def test_a_gradient_that_is_not_finite_is_skipped_and_told(found: list[dict[str, Any]]) -> None:
    clean(found, _spoiled)


def _endless(rank: int, ranks: int) -> str:
    engine = make(one_mesh(), 2, **BF16)
    engine.optimizer.skips.most = 4
    try:
        for _ in range(6):
            engine.backward((engine(torch.ones(2, D)) * float("inf")).float().mean())
            engine.step()
    except NonFiniteError as error:
        return f"{engine.skipped_steps}: {error}"
    return "went on"


def test_skipping_without_end_is_an_error() -> None:
    for told in run_ranks(_endless, 2, timeout=60):
        assert told.startswith("4: 4 steps in a row had non-finite gradients") and "the loss itself" in told, told


def _loss_at_fault(rank: int, ranks: int) -> list[Any]:
    """A NaN loss is no overflow: another loss scale would not help, and it stays. A gradient that overflows lowers it."""
    mesh, found = one_mesh(), []
    heard = Heard()
    logger.addHandler(heard)
    for how in ("loss", "gradient"):
        engine = make(mesh, 1, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
        out = engine(Where(0, 0, rank, ranks).data(3, D)).float().square().mean()
        if how == "gradient" and rank == 1:
            engine.module[2].bias.register_hook(lambda g: g * float("inf"))
        engine.backward(out * float("nan") if how == "loss" and rank == 1 else out)
        engine.step()
        found.append((engine.loss_scale, engine.was_step_applied()))
        engine.destroy()
    return [*found, [line for line in heard.lines if "step skipped" in line]]


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    results = run_ranks(_loss_at_fault, 2, timeout=60)
    for loss, gradient, _ in results:
        assert loss == (256.0, False) and gradient == (128.0, False)
    first, second = results[0][2]
    assert "the loss itself is NaN on rank 1" in first and "the loss itself" not in second


# --- modules that stay in fp32 ----------------------------------------------------------------------------------------


class Routed(nn.Module):
    """A router whose fp32 scores the model wants, one that gets 16-bit input, and a norm with a buffer between 16-bit layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)
        self.router, self.second = nn.Linear(D, 3), nn.ModuleDict({"router": nn.Linear(D, 3)})
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x))
        scores, other = self.router(x.float()), self.second["router"](x)
        self.types = [x.dtype, scores.dtype, other.dtype, self.router.weight.dtype, self.up.weight.dtype, self.norm.running_mean.dtype]
        return (self.down(x) * (scores.softmax(-1).max() + other.float().sigmoid().mean()).to(x.dtype)).float()


def _kept(rank: int, ranks: int, folder: str) -> list[str]:
    mesh, faults = one_mesh(), []
    kept = {"data_types": {"keep_in_fp32_modules": ["router", "nor*"]}}
    for name, config in (("bfloat16", BF16), ("float16", FP16)):
        results = []
        for stage in STAGES:
            engine = make(mesh, stage, Routed, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **kept, **config)
            low = getattr(torch, name)
            for step in range(3):
                engine.backward(engine(Where(step, 0, rank, ranks).data(4, D)).square().mean())
                engine.step()
            expected = [low, torch.float32, low, torch.float32, low, torch.float32]
            if engine.module.types != expected:
                faults.append(f"{name} stage {stage}: {engine.module.types}")
            weights = whole_weights(engine)
            if any((w.dtype is torch.float32) != ("router" in n or "norm" in n) for n, w in weights.items()):
                faults.append(f"{name} stage {stage}: { {n: w.dtype for n, w in weights.items()} }")
            if torch.equal(weights["router.weight"], weights["router.weight"].to(low).float()):
                faults.append(f"{name} stage {stage}: the router's weights have the precision of {name}")
            results.append(weights)
            if stage in (1, 3):
                at = f"{folder}/{name}{stage}"
                engine.save_checkpoint(at)
                other = make(mesh, 4 - stage, Routed, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **kept, **config)
                other.load_checkpoint(at)
                if difference(whole_weights(other), weights)[0] or whole_weights(other)["router.weight"].dtype is not torch.float32:
                    faults.append(f"{name} stage {stage}: loaded {difference(whole_weights(other), weights)}")
                other.destroy()
            engine.destroy()
            if any(m._forward_hooks or m._forward_pre_hooks for m in engine.module.modules()):
                faults.append(f"{name} stage {stage}: hooks are left")
        for stage in (1, 2, 3):
            if difference(results[stage], results[0])[0]:
                faults.append(f"{name}: stage {stage} differs from stage 0 by {difference(results[stage], results[0])}")
    try:
        make(mesh, 1, Routed, data_types={"keep_in_fp32_modules": ["ruoter"]}, **BF16)
        faults.append("a name that no module has: accepted")
    except ConfigError as error:
        if "'ruoter'" not in str(error):
            faults.append(str(error))
    return faults


def test_modules_that_stay_in_fp32(tmp_path: Path) -> None:
    faults = [line for found in run_ranks(_kept, 2, str(tmp_path), timeout=120) for line in found]
    assert not faults, "\n" + "\n".join(faults)


# --- sums of gradients -------------------------------------------------------------------------------------------------


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def _sums(rank: int, ranks: int) -> list[str]:
    """One large gradient and 63 tiny ones that bf16 would lose beside it."""
    mesh, faults = one_mesh(), []
    values = [256.0] + [0.25] * 63
    exact = sum(values) / 64
    for stage in STAGES:
        for wanted, lost in (({}, False), ({"data_types": {"grad_accum_dtype": "bf16"}}, True)):
            engine = make(mesh, stage, Weight, gradient_accumulation_steps=64, **BF16, **wanted)
            for value in values:
                engine.backward(engine(torch.full((8,), value)).float().sum())
                engine.step()
            master = safe_get_full_fp32_param(engine.module.w)
            off = float((master / -0.1 - exact).abs().max()) / exact
            if (off > 1e-3) is not lost or (not lost and off > 1e-6):
                faults.append(f"stage {stage} {wanted}: off by {off:.1e}")
            engine.destroy()
    return faults


def test_16_bit_gradients_are_added_up_in_fp32(found: list[dict[str, Any]]) -> None:
    clean(found, _sums)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.late, self.never = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = self.always(x).tanh()
        return (self.late(x) if late else x).float()


def _late(rank: int, ranks: int) -> list[str]:
    """bf16 weights, fp32 sums, a layer of the last micro-batch and one that nobody uses. The sums are equal on all ranks."""
    mesh, faults = one_mesh(), []
    model = fresh(Sometimes).bfloat16()
    grads = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    for micro in range(3):
        for r in range(ranks):
            model(Where(0, micro, r, ranks).data(3, D).bfloat16(), micro == 2).square().mean().backward()
            for n, p in model.named_parameters():
                if p.grad is not None:
                    grads[n] += p.grad.float() / (3 * ranks)
                    p.grad = None
    for stage in STAGES:
        for bucket in (TINY, DEFAULT):
            engine = make(mesh, stage, Sometimes, bucket, gradient_accumulation_steps=3, **BF16)
            for micro in range(3):
                engine.backward(engine(Where(0, micro, rank, ranks).data(3, D), micro == 2).square().mean())
                if micro < 2:
                    engine.step()
            for n, p in engine.module.named_parameters():
                got = safe_get_full_grad(p)
                if "never" in n:
                    if got is not None and got.any():
                        faults.append(f"stage {stage} {n}: {got}")
                    continue
                every = mesh.control.exchange(got.flatten().cpu(), "gradients")
                if got.dtype is not torch.float32 or not bool((every == every[0]).all()):
                    faults.append(f"stage {stage} {n}: not the same on all ranks, {got.dtype}")
                if not torch.allclose(got, grads[n], rtol=1e-5, atol=1e-6):
                    faults.append(f"stage {stage} {n}: {got} instead of {grads[n]}")
            engine.step()
            engine.destroy()
    return faults


def test_layers_of_some_micro_batches_in_bf16(found: list[dict[str, Any]]) -> None:
    clean(found, _late)


class Reused(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.f, self.g, self.mode = nn.Linear(D, D), nn.Linear(D, D), mode

    def _run(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x).tanh() if self.mode == "plain" else checkpoint(lambda h: part(h).tanh(), x, use_reentrant=self.mode == "reentrant")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (self._run(self.f, self._run(self.g, self._run(self.f, t.requires_grad_()))) for t in (x, y))
        return (a * b).float().mean()


def _reused(rank: int, ranks: int) -> list[str]:
    """f(g(f(x))) for two inputs, each call recomputed or not, in bf16: gradients of one process."""
    mesh, faults = one_mesh(), []
    for mode in ("plain", "reentrant", "non-reentrant"):
        model = fresh(lambda: Reused(mode)).bfloat16()  # noqa: B023
        grads = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
        for r in range(ranks):
            model(*(t.bfloat16() for t in Where(0, 0, r, ranks).data(2, 3, D))).backward()
            for n, p in model.named_parameters():
                grads[n] += p.grad.float() / ranks
                p.grad = None
        for stage in STAGES:
            for bucket in (TINY, DEFAULT):
                engine = make(mesh, stage, lambda: Reused(mode), bucket, **BF16)  # noqa: B023
                engine.backward(engine(*Where(0, 0, rank, ranks).data(2, 3, D)))
                for n, p in engine.module.named_parameters():
                    got = safe_get_full_grad(p)
                    # torch adds the contributions of one backward in bf16; where they are added may differ
                    if not torch.allclose(got, grads[n], rtol=3e-2, atol=float(grads[n].abs().max()) * 2e-2):
                        faults.append(f"{mode} stage {stage} {n}: {got} instead of {grads[n]}")
                engine.step()
                engine.destroy()
    return faults


def test_parts_used_several_times_in_bf16(found: list[dict[str, Any]]) -> None:
    clean(found, _reused)


# --- autocast ----------------------------------------------------------------------------------------------------------


def _autocast(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    model = fresh(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for r in range(ranks):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(Where(step, 0, r, ranks).data(3, D))
            (out.float().square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        engine = make(mesh, stage, torch_autocast={"enabled": True, "dtype": "bf16"})
        for step in range(2):
            out = engine(Where(step, 0, rank, ranks).data(3, D))
            if out.dtype is not torch.bfloat16 or engine.module[0].weight.dtype is not torch.float32:
                faults.append(f"stage {stage}: {out.dtype}")
            engine.backward(out.float().square().mean())
            engine.step()
        worst, who = difference(whole_weights(engine), {n: p.detach() for n, p in model.named_parameters()})
        if not worst <= 1e-6:
            faults.append(f"stage {stage}: {who} differs by {worst:.2e}")
        engine.destroy()
    return faults


def test_autocast_around_the_forward(found: list[dict[str, Any]]) -> None:
    clean(found, _autocast)


JOBS = [_spoiled, _sums, _late, _reused, _autocast]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """All of it, in one launch of ranks."""
    return run_ranks(run_jobs, 2, JOBS, timeout=240)
