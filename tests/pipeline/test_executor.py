"""The executor over real messages: any tree, any schedule, equal to the whole model; memory as the checker says."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.pipeline.actions import Action
from zeroengine.pipeline.checks import check
from zeroengine.pipeline.executor import Executor
from zeroengine.pipeline.schedules import SCHEDULES, forward_schedule

WIDTH = 5


def layers(stages: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(stages)]


class NoHooks:
    def gather(self, stage: int) -> None:
        return

    def before_backward(self, micro: int) -> None:
        return

    def before_gradients(self, stage: int, last: bool) -> None:
        return

    def after_backward(self, stage: int, weights: bool) -> None:
        return

    def computing(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()


class Kept:
    """What autograd keeps for backward, by stage and micro-batch."""

    def __init__(self) -> None:
        self.count: Counter[tuple[int, int]] = Counter()
        self.most = 0

    def of(self, stage: int, micro: int) -> AbstractContextManager[None]:
        count = self.count

        class One:
            def __init__(one, tensor: Tensor) -> None:
                one.tensor = tensor.detach()  # the tensor itself would hold the graph that holds it
                count[stage, micro] += 1
                self.most = max(self.most, sum(n > 0 for n in count.values()))

            def __del__(one) -> None:
                count[stage, micro] -= 1

        return torch.autograd.graph.saved_tensors_hooks(One, lambda one: one.tensor)


def samples(micro: int) -> dict[int, Tensor]:
    """Every micro-batch of another shape, some twice the same in a row."""
    return {i: torch.randn(1 + i // 2, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(micro)}


def whole(stages: int, micro: int) -> tuple[list[float], list[Tensor]]:
    model = nn.Sequential(*layers(stages))
    losses = []
    for x in samples(micro).values():
        loss = model(x.clone()).pow(2).sum()
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def _run(rank: int, world: int, cases: list[tuple[str, int, int]]) -> list[Any]:
    init_distributed(verbose=False)
    fabric = Fabric("cpu", timeout=8)
    streams = fabric.communicator("pipeline"), fabric.communicator("pipeline layouts")
    found = []
    for name, micro, chunks in cases:
        checked = check(SCHEDULES[name].build(world, micro, chunks))
        stages = checked.schedule.stages
        model = layers(stages)

        kept = Kept()

        def forward(stage: int, i: int, x: Tensor, model: list[nn.Module] = model, stages: int = stages, kept: Kept = kept) -> Tensor:
            with kept.of(stage, i):
                y = model[stage](x)
                return y.pow(2).sum() if stage == stages - 1 else y

        before = streams[1].traffic.calls["send"]
        executor = Executor(stages, checked.schedule.placement, forward, *streams, torch.device("cpu"), NoHooks())
        run = executor.run(checked, {i: x.clone() for i, x in samples(micro).items()})
        grads = {s: [p.grad for p in model[s].parameters()] for s in checked.schedule.stages_of(rank)}
        left = sum(r.live for r in executor.runners.values()) + sum(kept.count.values())
        layouts = streams[1].traffic.calls["send"] - before
        outputs = {i: float(v) for i, v in run.outputs.items()}
        found.append((outputs, grads, (run.peak_live, kept.most), checked.peak_live[rank], left, layouts))
    fabric.close()
    return found


CASES = {
    2: [
        ("gpipe", 4, 1),
        ("1f1b", 4, 1),
        ("interleaved", 4, 2),
        ("zb-h1", 4, 1),
        ("zb-v", 4, 2),
        ("dualpipe-v", 5, 2),
        ("1f1b", 1, 1),
    ],
    3: [("1f1b", 5, 1), ("interleaved", 6, 3), ("zb-v", 5, 2)],
}


@pytest.mark.parametrize("world", CASES)
def test_equal_to_the_whole_model(world: int) -> None:
    results = run_ranks(_run, world, CASES[world], timeout=100)
    for number, (name, micro, chunks) in enumerate(CASES[world]):
        losses, expected = whole(world * chunks, micro)
        got: dict[int, Any] = {}
        for rank in range(world):
            outputs, grads, peak, planned, left, layouts = results[rank][number]
            assert peak == (planned, planned), f"{name}: rank {rank} held {peak} activations, planned {planned}"
            assert left == 0
            got |= {s: g for s, g in grads.items()}
            if outputs:
                assert [outputs[i] for i in range(micro)] == pytest.approx(losses, rel=1e-6)
            # a change of shape every second micro-batch, on each edge (activation and gradient) of at most 2 a stage
            assert layouts <= 2 * chunks * -(-micro // 2)
        flat = [t for s in sorted(got) for t in got[s]]
        assert len(flat) == len(expected), name
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(flat, expected, strict=True)), name


def _trees(rank: int, world: int) -> Any:
    """Masks, positions, None, a number, a float without grad, an output that is passed through, cross three ranks."""
    init_distributed(verbose=False)
    fabric = Fabric("cpu", timeout=8)
    streams = fabric.communicator("pipeline"), fabric.communicator("pipeline layouts")
    seen: list[Any] = []

    def forward(stage: int, micro: int, tree: Any) -> Any:
        seen.append([None if x is None else (x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in tree["rest"]])
        hidden, extra = tree["hidden"]
        hidden = hidden * weight
        if stage == world - 1:
            return (hidden.sum() + extra.sum()) * tree["rest"][3]
        return {"hidden": (hidden, extra), "rest": tree["rest"]}

    weight = torch.tensor(2.0, requires_grad=True)
    executor = Executor(world, tuple(range(world)), forward, *streams, torch.device("cpu"), NoHooks())
    extra = torch.ones(2, requires_grad=True)
    rest = (torch.tensor([True, False]), torch.arange(3), None, 3, torch.ones(2, dtype=torch.float64), "flag", torch.empty(0, 4))
    feed = {i: {"hidden": (torch.ones(4), extra), "rest": rest} for i in range(4)}
    run = executor.run(check(SCHEDULES["zb-h1"].build(world, 4)), feed)
    only = executor.run(check(forward_schedule(tuple(range(world)), 3)), feed)
    sent = fabric._made[0].traffic.calls["send"]
    fabric.close()
    return run.outputs, float(weight.grad), extra.grad, seen, sent, only.outputs  # type: ignore[arg-type]


def test_any_tree_crosses() -> None:
    first, middle, last = run_ranks(_trees, 3, timeout=60)
    assert first[3] == middle[3] == last[3]
    assert last[0] == last[5] | {3: last[0][3]} and float(last[0][0]) == 3 * (4 * 8 + 2)
    assert [r[1] for r in (first, middle, last)] == [4 * 3 * 4 * 4.0] * 3
    assert torch.equal(first[2], torch.full((2,), 12.0))
    assert first[4] == 7 and middle[4] == 4 + 7  # one message a crossing: 4 + 3 activations, and 4 gradients


def _fail(rank: int, world: int, how: str) -> float:
    init_distributed(verbose=False)
    fabric = Fabric("cpu", timeout=5)
    streams = fabric.communicator("pipeline"), fabric.communicator("pipeline layouts")

    def forward(stage: int, micro: int, x: Tensor) -> Tensor:
        if rank == 1 and micro == 2:
            if how == "dies":
                os._exit(9)
            raise ValueError("a fault in stage 1")
        return (x * weight).sum() if stage == world - 1 else x * weight

    weight = torch.ones(3, requires_grad=True)
    executor = Executor(world, tuple(range(world)), forward, *streams, torch.device("cpu"), NoHooks())
    start = time.monotonic()
    executor.run(check(SCHEDULES["1f1b"].build(world, 6)), {i: torch.ones(3) for i in range(6)})
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_stage_that_fails_ends_all(how: str) -> None:
    outcomes = run_ranks(_fail, 3, how, timeout=60, failures=True)
    assert all(o.exitcode for o in outcomes), [o.exitcode for o in outcomes]
    for rank in (0, 2):
        assert outcomes[rank].error and "rank 1" in outcomes[rank].error, outcomes[rank].error
        assert outcomes[rank].seconds - outcomes[1].seconds < 10
    if how == "raises":
        assert "a fault in stage 1" in outcomes[1].error  # type: ignore[operator]
