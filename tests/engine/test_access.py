"""`zeroengine.utils.safe_get_*` and `safe_set_*`: one parameter's values, gradient and state at every stage."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.engine.versus_torch import TINY, Where, check, fresh, one_mesh
from zeroengine.errors import DivergenceError, ModelError
from zeroengine.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

pytestmark = pytest.mark.ranks
D = 6


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 5), nn.Linear(5, 3))
    model[2].bias.requires_grad_(False)
    return model


def _access(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []

    def expect(label: str, got: Any, wanted: Any, tolerance: float = 1e-6) -> None:
        if got is None or wanted is None:
            if got is not wanted:
                faults.append(f"{label}: {got} instead of {wanted}")
        elif got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance):
            faults.append(f"{label}: {got} instead of {wanted}")

    for stage in (0, 1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage, "bucket_size": TINY},
        }  # fmt: skip
        engine = zeroengine.initialize(model=fresh(small), config=config, mesh=mesh)[0]
        twin = fresh(small)
        optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.1)
        pairs = [(n, p, q) for (n, p), q in zip(engine.module.named_parameters(), twin.parameters(), strict=True)]
        for step in range(2):
            for micro in range(2):
                for r in range(ranks):
                    (twin(Where(step, micro, r, ranks).data(3, D)).square().mean() / (2 * ranks)).backward()
                engine.backward(engine(Where(step, micro, rank, ranks).data(3, D)).square().mean())
                for name, p, q in pairs:  # the gradients so far, in the middle of an accumulation too
                    expect(f"stage {stage} gradient of {name}", safe_get_full_grad(p), q.grad)
                if micro == 0:
                    engine.step()
            weight, other = pairs[0][1], pairs[0][2]
            safe_set_full_grad(weight, torch.full((D, D), 0.25))
            other.grad.fill_(0.25)
            parts = [safe_get_local_grad(p) for _, p, q in pairs if q.grad is not None]
            if not all(bool((t == 0.25).all()) for t in parts[:1]):
                faults.append(f"stage {stage}: local gradient {parts[0]}")
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
            for name, p, q in pairs:
                label = f"stage {stage} step {step} {name}"
                expect(label, safe_get_full_fp32_param(p), q.detach())
                expect(f"{label} exp_avg", safe_get_full_optimizer_state(p, "exp_avg"), optimizer.state[q].get("exp_avg"))
                expect(f"{label} step", safe_get_full_optimizer_state(p, "step"), optimizer.state[q].get("step"))
                expect(f"{label} gradient after the step", safe_get_full_grad(p), None)
            weight, other = pairs[2][1], pairs[2][2]
            safe_set_full_fp32_param(weight, torch.full((5, D), 0.5))
            safe_set_full_optimizer_state(weight, torch.full((5, D), 0.125), "exp_avg")
            with torch.no_grad():
                other.fill_(0.5)
                optimizer.state[other]["exp_avg"].fill_(0.125)
            expect(f"stage {stage} set", safe_get_full_fp32_param(weight), other.detach(), 0.0)
            if not bool((safe_get_local_fp32_param(weight) == 0.5).all()):
                faults.append(f"stage {stage}: local values")
        bias = engine.module[2].bias
        for what, refuse in (
            ("shape", partial(safe_set_full_fp32_param, weight, torch.zeros(2))),
            ("frozen", partial(safe_set_full_fp32_param, bias, torch.zeros(3))),
            ("no step", partial(safe_set_full_grad, weight, torch.zeros(5, D))),
            ("no state", partial(safe_set_full_optimizer_state, weight, torch.zeros(5, D), "nothing")),
            ("unlike", partial(safe_set_full_fp32_param, weight, torch.full((5, D), float(rank)))),
        ):
            try:
                refuse()
                faults.append(f"stage {stage}: {what} was accepted")
            except (ModelError, DivergenceError):
                pass
        engine.destroy()
    return faults


def test_values_gradients_and_state_of_a_parameter() -> None:
    check(_access)


def _masters(rank: int, ranks: int) -> list[str]:
    faults = []
    for stage in (0, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "zero_optimization": {"stage": stage, "bucket_size": TINY},
        }  # fmt: skip
        engine = zeroengine.initialize(model=fresh(small), config=config, mesh=one_mesh())[0]
        exact = torch.full((D, D), 1.0 + 2.0**-20)
        safe_set_full_fp32_param(engine.module[0].weight, exact)
        engine.backward(engine(torch.ones(2, D)).float().mean())
        engine.step()
        got = safe_get_full_fp32_param(engine.module[0].weight)
        if got.dtype is not torch.float32 or not torch.equal(got, exact):
            faults.append(f"stage {stage}: {got}")
    return faults


def test_masters_keep_their_precision() -> None:
    check(_masters)
