"""What can not work is refused with a clear error, on every rank, within seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.engine.versus_torch import check, one_mesh
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, DivergenceError, ModelError, RankError

D = 6


def _config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "bucket_size": 24},
    }
    return {k: v for k, v in {**base, **changes}.items() if v is not None}


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))


def _stranger() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


def _used_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, D)).sum().backward()
    optimizer.step()
    return optimizer


Attempt = Callable[[int, Any], Any]
ATTEMPTS: dict[str, tuple[type[Exception], str, Attempt]] = {
    "no parameters": (ModelError, "no parameters", lambda r, i: i(nn.Tanh(), _config())),
    "no parameters, evaluation": (ModelError, "no parameters", lambda r, i: i(nn.Tanh(), _config(optimizer=None))),
    "all frozen": (ModelError, "frozen", lambda r, i: i(_linear().requires_grad_(False), _config())),
    "meta": (
        ModelError, "'0.weight' is on the meta device",
        lambda r, i: i(nn.Sequential(nn.Linear(D, D, device="meta")), _config()),
    ),
    "not a module": (ModelError, "nn.Module, not function", lambda r, i: i(lambda x: x, _config())),
    "no module": (ModelError, "nn.Module, not NoneType", lambda r, i: i(None, _config())),
    "another shape": (DivergenceError, "0.weight", lambda r, i: i(nn.Sequential(nn.Linear(D, D + r)), _config())),
    "another count": (
        DivergenceError, "another number",
        lambda r, i: i(nn.Sequential(*(nn.Linear(D, D) for _ in range(r + 1))), _config()),
    ),
    "another name": (
        DivergenceError, "number 0",
        lambda r, i: i(nn.ModuleDict({f"part{r}": nn.Linear(D, D)}), _config()),
    ),
    "frozen on one rank": (
        DivergenceError, "requires_grad",
        lambda r, i: i(nn.Sequential(nn.Linear(D, D).requires_grad_(r == 0), nn.Linear(D, D)), _config()),
    ),
    "batch": (ConfigError, "train_batch_size", lambda r, i: i(_linear(), _config(train_batch_size=3))),
    "no config": (ConfigError, "no configuration", lambda r, i: i(_linear(), None)),
    "no file": (ConfigError, "/nowhere/at/all.json", lambda r, i: i(_linear(), "/nowhere/at/all.json")),
    "unknown key": (
        ConfigError, "zero_optimization.stag",
        lambda r, i: i(_linear(), _config(zero_optimization={"stag": 3})),
    ),
    "stage 4": (
        ConfigError, "zero_optimization.stage",
        lambda r, i: i(_linear(), _config(zero_optimization={"stage": 4})),
    ),
    "both": (
        ConfigError, "fp16.*bf16|bf16.*fp16",
        lambda r, i: i(_linear(), _config(fp16={"enabled": True}, bf16={"enabled": True})),
    ),
    "unknown optimizer": (
        ConfigError, "AdamX.*did you mean",
        lambda r, i: i(_linear(), _config(optimizer={"type": "AdamX", "params": {}})),
    ),
    "bad parameter": (
        ConfigError, "optimizer.params.bettas.*betas",
        lambda r, i: i(_linear(), _config(optimizer={"type": "AdamW", "params": {"bettas": [0, 1]}})),
    ),
    "bad value": (
        ConfigError, "betas|beta",
        lambda r, i: i(_linear(), _config(optimizer={"type": "AdamW", "params": {"betas": [0.9, 7.0]}})),
    ),
    "stranger": (
        ConfigError, "not a parameter of the model",
        lambda r, i: i(_linear(), _config(optimizer=None), optimizer=_stranger()),
    ),
    "not a parameter": (
        ConfigError, "holds a str",
        lambda r, i: i(_linear(), _config(), model_parameters=[{"params": ["weight"]}]),
    ),
    "whole matrices": (
        ConfigError, "whole matrices|closure",
        lambda r, i: i(_linear(), _config(), optimizer=lambda groups: torch.optim.LBFGS(groups[0]["params"])),
    ),
}  # fmt: skip


def _refused(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for name, (kind, text, attempt) in ATTEMPTS.items():

        def initialize(model: Any, config: Any, **more: Any) -> Any:
            return zeroengine.initialize(model=model, config=config, mesh=mesh, **more)  # noqa: B023

        start = time.monotonic()
        try:
            attempt(rank, initialize)
            faults.append(f"{name}: accepted")
        except kind as error:
            if not re.search(text, str(error)):
                faults.append(f"{name}: {error}")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error}")
        if time.monotonic() - start > 10:
            faults.append(f"{name}: took {time.monotonic() - start:.0f} s")
    # a model whose engine was refused is as it was
    model = _linear()
    optimizer = _used_optimizer(model)
    for again in (_stranger(), lambda groups: torch.optim.LBFGS(groups[0]["params"]), optimizer):
        with pytest.raises(ConfigError):
            zeroengine.initialize(model=model, config=_config(optimizer=None), optimizer=again, mesh=mesh)
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            faults.append("hooks are left after a refusal")
    engine = zeroengine.initialize(model=model, config=_config(), mesh=mesh)[0]
    faults += _misused(engine)
    return faults


def _misused(engine: Any) -> list[str]:
    faults = []
    x = torch.ones(2, D)
    second = {
        "a vector": (ValueError, r"scalar loss, not \(2, 6\)", lambda: engine.backward(engine(x))),
        "a number": (ValueError, "not float", lambda: engine.backward(1.0)),
        "without gradient": (ValueError, "requires no grad", lambda: engine.backward(engine(x).detach().mean())),
        "closure": (ValueError, "closure", lambda: engine.optimizer.step(lambda: engine(x).mean())),
        "new group": (ConfigError, "no trainable parameter", lambda: engine.optimizer.add_param_group({"params": []})),
        "second engine": (ModelError, "belongs to another engine", lambda: zeroengine.initialize(
            model=engine.module, config=_config(), mesh=engine.mesh)),
        "no data": (ValueError, "without training_data", lambda: engine.train_batch()),
    }  # fmt: skip
    for name, (kind, text, attempt) in second.items():
        try:
            attempt()
            faults.append(f"{name}: accepted")
        except kind as error:
            if not re.search(text, str(error)):
                faults.append(f"{name}: {error}")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error}")
    engine.backward(engine(x).mean())
    engine.step()
    engine.destroy()
    with pytest.raises(ConfigError, match="destroyed"):
        engine.step()
    engine.destroy()
    return faults


def test_refusals() -> None:
    check(_refused)


def _uneven(rank: int, world: int, stage: int, bucket: int | None) -> str:
    mesh = one_mesh()
    config = _config(zero_optimization={"stage": stage, **({"bucket_size": bucket} if bucket else {})})
    engine = zeroengine.initialize(model=_linear(), config={**config, "gradient_accumulation_steps": 3}, mesh=mesh)[0]
    try:
        for _ in range(3 - rank):
            engine.backward(engine(torch.ones(2, D)).mean())
            engine.mechanism.reducer.next_micro_batch()
        engine.optimizer.step()
    except RankError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("stage", "bucket"), [(0, 24), (2, None), (3, 24)])
def test_another_number_of_micro_batches(stage: int, bucket: int | None) -> None:
    start = time.monotonic()
    outcomes = run_ranks(_uneven, 2, stage, bucket, timeout=60, failures=True)
    assert time.monotonic() - start < 40
    for outcome in outcomes:
        assert outcome.value is not None and outcome.value != "no error", outcome
        assert "rank 0" in outcome.value and "rank 1" in outcome.value, outcome.value
