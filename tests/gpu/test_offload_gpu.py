"""Offload of an accelerator's states to the host and to a disk: the bits and the device's memory. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import tokens
from tests.offload.runs import Plan
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PLACES: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
    ({"device": "cpu"}, None), ({"device": "nvme", "buffer_count": 2}, None), ({"device": "cpu", "ratio": 0.5}, None),
    ({"device": "cpu"}, {"device": "cpu"}), ({"device": "nvme"}, {"device": "nvme", "buffer_count": 2}),
]  # fmt: skip


def _train(plan: Plan, rank: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    from tests.offload.runs import start

    engine = start(plan, folder)
    losses = []
    for step in range(3):
        loss = engine(*(t.cuda() for t in tokens(step, 0, rank)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    held = torch.cuda.memory_allocated()
    weights = engine.full_state_dict() or {}
    engine.offload_states()
    left = torch.cuda.memory_allocated()
    engine.reload_states()
    engine.destroy()
    return losses, dict(weights), held - left


def _all(rank: int, world: int, folder: str) -> list[str]:
    faults = []
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            losses, weights, freed = _train(Plan(stage, dtype=dtype), rank, folder)
            if freed <= 0:
                faults.append(f"stage {stage} {dtype}: offload_states freed {freed} bytes")
            for state, values in PLACES[: 5 if stage == 3 else 3]:
                got_losses, got, _ = _train(Plan(stage, state, values, dtype), rank, folder)
                if got_losses != losses or not all(torch.equal(w, got[n]) for n, w in weights.items()):
                    faults.append(f"stage {stage} {dtype} {state} {values}: {got_losses} instead of {losses}")
    return faults


def test_the_bits_are_those_of_states_on_the_device(tmp_path: Path) -> None:
    assert run_ranks(_all, 1, str(tmp_path), timeout=200) == [[]]


def test_activations_on_the_host() -> None:
    from zeroengine.offload.activations import ActivationsOnHost

    weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
    grads = []
    for where in (None, ActivationsOnHost([weight], 1000, pin=True)):
        x = torch.randn(64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0), requires_grad=True)
        if where is None:
            y = (x @ weight).exp()
        else:
            with where:
                y = (x @ weight).exp()
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
