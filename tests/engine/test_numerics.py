"""Every stage equals one process: losses, norms, weights; and every stage equals every other to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.models import TinyLM, config, tokens
from tests.ranks import run_ranks

STEPS = 3
CLIP = 0.5
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "AdamW": {"lr": 1e-2},
    "Adam": {"lr": 1e-2, "weight_decay": 0.01},
}


class Run:
    """What one training run gave: the mean loss and the norm of each step, the weights, which steps were applied."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.applied: list[bool] = []


def one_process(world: int, accumulation: int, dtype: torch.dtype, optimizer: str, scale: float = 1.0) -> Run:
    """The same mathematics in one process: 16-bit forward and backward on a working copy, everything else in fp32."""
    torch.manual_seed(1)
    masters = TinyLM()
    working = TinyLM().to(dtype)
    update = getattr(torch.optim, optimizer)(masters.parameters(), **OPTIMIZERS[optimizer])
    run = Run()
    for step in range(STEPS):
        working.load_state_dict(masters.state_dict())
        grads = {n: torch.zeros_like(p) for n, p in masters.named_parameters()}
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                loss = working(*tokens(step, micro, rank))
                (loss * scale).backward()
                for n, p in working.named_parameters():
                    assert p.grad is not None
                    grads[n] += p.grad.float() / scale / (accumulation * world)
                    p.grad = None
                total += loss.item() / (accumulation * world)
        for n, p in masters.named_parameters():
            p.grad = grads[n]
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.parameters(), CLIP)))
        update.step()
        run.losses.append(total)
    run.weights = {n: p.detach().clone() for n, p in masters.named_parameters()}
    return run


def train(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Run]:
    """Several runs one after another in the same processes: (stage, accumulation, dtype, plain backward, ...)."""
    import zeroengine

    runs = []
    for v in variants:
        torch.manual_seed(1 if rank == 0 else 99)  # rank 0's weights count
        changes: dict[str, Any] = {
            "gradient_accumulation_steps": v["accumulation"],
            "gradient_clipping": CLIP,
            "optimizer": {"type": v["optimizer"], "params": OPTIMIZERS[v["optimizer"]]},
            **v.get("changes", {}),
        }
        if v["dtype"] != "fp32":
            changes[v["dtype"]] = {"enabled": True, **v.get("precision", {})}
        engine, *_ = zeroengine.initialize(model=TinyLM(), config=config(v["stage"], **changes))
        run = Run()
        for step in range(STEPS):
            total = 0.0
            for micro in range(v["accumulation"]):
                loss = engine(*tokens(step, micro, rank))
                loss.backward() if v.get("plain") else engine.backward(loss)
                engine.step()
                total += loss.item() / v["accumulation"]
            run.losses.append(total)
            run.norms.append(engine.get_global_grad_norm())
            run.applied.append(engine.was_step_applied())
        full = engine.full_state_dict()
        run.weights = {} if full is None else dict(full)
        engine.destroy()
        runs.append(run)
    return runs


def mean_losses(runs: list[Run]) -> list[float]:
    return [sum(r.losses[i] for r in runs) / len(runs) for i in range(STEPS)]


def distance(run: Run, reference: Run) -> float:
    """Largest difference of the weights, relative to the largest weight."""
    scale = max(float(w.abs().max()) for w in reference.weights.values())
    return max(float((run.weights[n].float() - w).abs().max()) for n, w in reference.weights.items()) / scale


def same_bits(a: Run, b: Run) -> bool:
    return a.losses == b.losses and a.norms == b.norms and all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)


def variants(stages: range, **fixed: Any) -> list[dict[str, Any]]:
    return [{"stage": s, "accumulation": 1, "dtype": "fp32", "optimizer": "AdamW", **fixed} for s in stages]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_fp32_equals_one_process(world: int) -> None:
    plans = [*variants(range(4)), *variants(range(4), accumulation=4, optimizer="SGD")]
    if world == 2:
        plans += [
            *variants(range(4), plain=True),
            *variants(range(4), accumulation=4, optimizer="SGD", plain=True),
            *variants(range(4), accumulation=4),
            *variants(range(4), optimizer="Adam"),
        ]
    by_rank = run_ranks(train, world, plans, timeout=200)
    for i, plan in enumerate(plans):
        runs = [ranks[i] for ranks in by_rank]
        reference = one_process(world, plan["accumulation"], torch.float32, plan["optimizer"])
        told = f"{plan}"
        assert mean_losses(runs) == pytest.approx(reference.losses, rel=1e-6), told
        assert runs[0].norms == pytest.approx(reference.norms, rel=1e-6), told
        # Adam divides by a root of the gradient: where that is nearly zero, rounding shows in full.
        assert distance(runs[0], reference) < (1e-6 if plan["optimizer"] == "SGD" else 3e-5), told
        assert all(r.norms == runs[0].norms for r in runs), told
    for first in range(0, len(plans), 4):
        for stage in (1, 2, 3):
            if plans[first]["accumulation"] == 1:
                assert all(same_bits(ranks[first + stage], ranks[first]) for ranks in by_rank), plans[first + stage]
        assert same_bits(by_rank[0][first + 3], by_rank[0][first + 2])  # the same micro-batches in the same order
    if world == 2:  # loss.backward() and engine.backward(loss)
        assert all(same_bits(ranks[i], ranks[i + 8]) for ranks in by_rank for i in range(8))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_16_bit_equals_fp32_masters_in_one_process(world: int) -> None:
    static = {"loss_scale": 1024.0}
    plans = [
        *variants(range(4), dtype="bf16"),
        *variants(range(4), dtype="bf16", accumulation=4),
        *variants(range(4), dtype="fp16", precision=static),
        *variants(range(4), dtype="fp16", accumulation=4, precision=static),
    ]
    if world == 2:
        plans += variants(range(4), dtype="fp16", precision={"initial_scale_power": 8})
    if world == 4:  # the other two need no fourth rank
        plans = [*plans[4:8], *plans[8:12]]
    by_rank = run_ranks(train, world, plans, timeout=200)
    for i, plan in enumerate(plans):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[plan["dtype"]]
        scale = {"bf16": 1.0, "fp16": 256.0 if "initial_scale_power" in plan.get("precision", {}) else 1024.0}[plan["dtype"]]
        reference = one_process(world, plan["accumulation"], dtype, "AdamW", scale)
        runs = [ranks[i] for ranks in by_rank]
        assert all(runs[0].applied), plan
        tolerance = 2e-3 if plan["dtype"] == "fp16" else 1e-2
        assert mean_losses(runs) == pytest.approx(reference.losses, rel=tolerance), plan
        assert runs[0].norms == pytest.approx(reference.norms, rel=3 * tolerance), plan
        # The first step starts from the same weights: only the order of the sum over ranks differs.
        assert mean_losses(runs)[0] == pytest.approx(reference.losses[0], rel=1e-6), plan
        assert runs[0].norms[0] == pytest.approx(reference.norms[0], rel=1e-5), plan
    for first in range(0, len(plans), 4):
        if plans[first]["accumulation"] == 1:
            for stage in (1, 2, 3):
                assert all(same_bits(ranks[first + stage], ranks[first]) for ranks in by_rank), plans[first + stage]


def test_hybrid_sharding_2x2_has_the_bits_of_flat_sharding() -> None:
    hybrid = {"mesh": {"dp_replicate": 2, "dp_shard": 2}}
    # SGD: see below. Adam's rounding at the ends of slices would differ between 2 and 4 slices.
    flat, nested = variants(range(4), optimizer="SGD"), variants(range(4), optimizer="SGD", changes=hybrid)
    plans = [*flat, *nested, *variants(range(1, 4), accumulation=4, changes=hybrid)]
    by_rank = run_ranks(train, 4, plans, timeout=200)
    for ranks in by_rank:
        for stage in range(4):
            assert ranks[4 + stage].losses == ranks[stage].losses
            assert ranks[4 + stage].weights.keys() == ranks[stage].weights.keys()
            for n, w in ranks[stage].weights.items():
                assert torch.equal(ranks[4 + stage].weights[n], w), (stage, n)
    reference = one_process(4, 4, torch.float32, "AdamW")
    for i in range(8, 11):
        assert mean_losses([ranks[i] for ranks in by_rank]) == pytest.approx(reference.losses, rel=1e-6)
        assert distance(by_rank[0][i], reference) < 3e-5


def test_bits_do_not_depend_on_buckets_prefetch_or_residency() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"bucket_size": 10**6},
        {"bucket_size": 1},
        {"stage3_prefetch_bucket_size": 0},
        {"stage3_prefetch_bucket_size": 10**6},
        {"stage3_param_persistence_threshold": 100},
        {"stage3_max_live_parameters": 1400},
        {"stage3_max_reuse_distance": 10**6},
        {"reduce_bucket_size": 300},
    ]
    # SGD: torch's fused Adam rounds the last few elements of a tensor differently, and other buckets cut tensors elsewhere.
    plans = [{**variants(range(3, 4), optimizer="SGD")[0], "changes": {"zero_optimization": way}} for way in ways]
    by_rank = run_ranks(train, 3, plans, timeout=200)
    for i, way in enumerate(ways):
        assert by_rank[0][i].losses == by_rank[0][0].losses, way
        for n, w in by_rank[0][0].weights.items():
            assert torch.equal(by_rank[0][i].weights[n], w), (way, n)
