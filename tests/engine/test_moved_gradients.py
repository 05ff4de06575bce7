"""`param.grad` after backward: the values are in buckets, and nothing that uses them is passed over in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroengine
from tests.engine.versus_torch import TINY, Where, check, fresh, one_mesh
from zeroengine.errors import ModelError, MovedGradientError, ReleasedParameterError
from zeroengine.logging import logger

pytestmark = pytest.mark.ranks
D = 6


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


def make(mesh: Any, stage: int, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "bucket_size": TINY},
        **config,
    }
    return zeroengine.initialize(model=fresh(small), config=settings, mesh=mesh)[0]


def loss_of(engine: Any, rank: int, step: int = 0) -> Tensor:
    return engine(Where(step, 0, rank, 2).data(3, D)).float().square().mean()


USES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_norm_ foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "norm": lambda m: m[0].weight.grad.norm(),
    "data": lambda m: m[0].weight.grad.data,
    "clone": lambda m: m[0].weight.grad.detach().clone(),
    "zero_": lambda m: m[0].weight.grad.zero_(),
    "mul_": lambda m: m[0].weight.grad.mul_(2),
    "foreach": lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 0.5),
    "another optimizer": lambda m: torch.optim.AdamW(m.parameters(), fused=True).step(),
}


def _used(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for stage in (0, 1, 2, 3):
        engine = make(mesh, stage)
        if any(p.grad is not None for p in engine.module.parameters()):
            faults.append(f"stage {stage}: gradients before backward")
        engine.backward(loss_of(engine, rank))
        for name, use in USES.items():
            try:
                faults.append(f"stage {stage}: {name} gives {use(engine.module)}")
            except ReleasedParameterError:  # of the values of sharded parameters, which come first
                if (stage, name) != (3, "another optimizer"):
                    faults.append(f"stage {stage}: {name}: of released values")
            except MovedGradientError as error:
                if "gradient_clipping" not in str(error) or "'0." not in str(error):
                    faults.append(f"stage {stage}: {name}: {error}")
        for p in engine.module.parameters():
            if p.grad is None or p.grad.shape != p.shape or p.grad.dtype is not p.dtype or "Moved" not in repr(p.grad):
                faults.append(f"stage {stage}: facts of {p.grad!r}")
        engine.step()
        if any(p.grad is not None for p in engine.module.parameters()):
            faults.append(f"stage {stage}: gradients after the step")
        loss = loss_of(engine, rank)
        loss.backward(retain_graph=True)
        loss.backward()  # adds to what is there
        engine.step()
        twice = engine.get_global_grad_norm()
        engine.destroy()
        engine = make(mesh, stage)
        for step in range(2):
            engine.backward(loss_of(engine, rank) * (1 + step))
            engine.step()
        if abs(twice - engine.get_global_grad_norm()) > 1e-6 * twice:
            faults.append(f"stage {stage}: two backwards add to {twice} instead of {engine.get_global_grad_norm()}")
        engine.destroy()
    return faults


def test_values_of_a_moved_gradient_are_an_error_and_facts_are_not() -> None:
    check(_used)


def _clear(engine: Any) -> None:
    engine.module.zero_grad()


def _assign(engine: Any) -> None:
    p = engine.module[0].bias
    p.grad = torch.ones_like(p)


def _assigned(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for stage in (0, 3):
        for change, remedy in ((_clear, "engine.zero_grad()"), (_assign, "safe_set_full_grad")):
            engine = make(mesh, stage)
            engine.backward(loss_of(engine, rank))
            change(engine)
            try:
                engine.step()
                faults.append(f"stage {stage}: {change.__name__} was accepted")
            except ModelError as error:
                if remedy not in str(error):
                    faults.append(str(error))
            engine.zero_grad()
            engine.backward(loss_of(engine, rank))
            engine.zero_grad()  # of the engine, and of its optimizer
            engine.backward(loss_of(engine, rank))
            engine.optimizer.zero_grad()
            if any(p.grad is not None for p in engine.module.parameters()):
                faults.append(f"stage {stage}: gradients after zero_grad")
            engine.module.zero_grad()  # of a plain script: before backward and after the step
            engine.backward(loss_of(engine, rank))
            engine.step()
            engine.module.zero_grad()
            engine.destroy()
    return faults


def test_gradients_that_the_user_clears_or_assigns() -> None:
    check(_assigned)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _unscaled(rank: int, ranks: int) -> list[str]:
    mesh, faults, heard = one_mesh(), [], _Heard()
    logger.addHandler(heard)
    for guided in (True, False):
        engine = make(mesh, 1, fp16={"enabled": True, "loss_scale": 128.0})
        for step in range(2):
            loss = loss_of(engine, rank, step)
            engine.backward(loss) if guided else loss.backward()
            engine.step()
        told = [line for line in heard.lines if "engine.backward(loss)" in line]
        if len(told) != (0 if guided or rank else 1):
            faults.append(f"guided {guided}: {heard.lines}")
        engine.destroy()
    return faults


def test_plain_backward_in_fp16_says_that_it_is_not_scaled() -> None:
    check(_unscaled)
