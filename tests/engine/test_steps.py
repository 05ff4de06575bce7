"""The shapes that a training loop can have: every stage trains as one process does."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroengine
from tests.engine.versus_torch import (
    DEFAULT,
    STAGES,
    TINY,
    Case,
    Where,
    check,
    difference,
    fresh,
    one_mesh,
    run_cases,
    settings,
    whole_weights,
)  # fmt: skip
from zeroengine.errors import ConfigError, ModelError

pytestmark = pytest.mark.ranks
D = 6


def mlp(layers: int = 3) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(D, D), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def _twice_retained(model: nn.Module, where: Where) -> tuple[float]:
    out = model(where.data(5, D))
    a, b = out.square().mean(), out.abs().mean()
    a.backward(retain_graph=True)
    b.backward()
    return (float((a + b).detach()),)


def _same_twice(model: Any, where: Where) -> tuple[float]:
    loss = model(where.data(5, D)).square().mean()
    run = model.backward if hasattr(model, "backward") else Tensor.backward
    run(loss, retain_graph=True)
    run(loss)
    return (float(loss.detach()),)


def _two_forwards_two_backwards(model: nn.Module, where: Where) -> tuple[float]:
    a = model(where.data(5, D)).square().mean()
    b = model(where.data(5, D).flip(0)).abs().mean()
    a.backward()
    b.backward()
    return (float((a + b).detach()),)


def _backward_forward_backward(model: nn.Module, where: Where) -> tuple[float]:
    total = 0.0
    for i in range(3):
        loss = model(where.data(5, D).roll(i)).square().mean()
        loss.backward()
        total += float(loss.detach())
    return (total,)


def _two_forwards_one_backward(model: nn.Module, where: Where) -> Tensor:
    return model(where.data(5, D)).square().mean() + model(where.data(3, D)).abs().mean()


def _evaluations_between(model: nn.Module, where: Where) -> Tensor:
    x = where.data(5, D)
    with torch.inference_mode():
        model(x)
    loss = model(x).square().mean()
    with torch.no_grad():
        model(x + 1)
    model.eval()
    with torch.inference_mode():
        model(x)
    model.train()
    model(x)  # with gradients that nobody asks for
    return loss


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.ways = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        x = self.first(x).tanh()
        for i in order:
            x = self.ways[i](x).tanh()
        return self.last(x)


ORDERS = [[0, 1, 2], [2, 0], [1], [2, 1, 0, 2], [0, 1, 2]]


def _branches(model: nn.Module, where: Where) -> Tensor:
    return model(where.data(5, D), ORDERS[where.step]).square().mean()


LOOPS = [
    Case("retained", mlp, _twice_retained),
    Case("retained, accumulation", mlp, _twice_retained, accumulation=2),
    Case("the same loss twice", mlp, _same_twice),
    Case("two and two", mlp, _two_forwards_two_backwards, accumulation=2),
    Case("forward and backward, three times", mlp, _backward_forward_backward),
    Case("two and one", mlp, _two_forwards_one_backward, accumulation=2),
    Case("evaluations between", mlp, _evaluations_between, accumulation=2, steps=3),
    Case("another order", Branches, _branches, steps=5, accumulation=2),
    Case("another order, small window", Branches, _branches, steps=5,
         zero={"stage3_max_live_parameters": 50, "stage3_prefetch_bucket_size": 30}, stages=(3,)),
    Case("another order, large window", Branches, _branches, steps=5,
         zero={"stage3_prefetch_bucket_size": 1000, "stage3_max_reuse_distance": 1000}, stages=(3,)),
    Case("another order, no prefetch", Branches, _branches, steps=5, zero={"stage3_prefetch_bucket_size": 0}, stages=(3,)),
    Case("half model", lambda: mlp().bfloat16(), lambda m, w: m(w.data(5, D).bfloat16()).float().square().mean(),
         tolerance=2e-2, steps=1),
    Case("double model", lambda: mlp().double(), lambda m, w: m(w.data(5, D).double()).square().mean()),
]  # fmt: skip


def _loops(rank: int, ranks: int) -> list[str]:
    return run_cases(rank, ranks, LOOPS)


def test_loops() -> None:
    check(_loops)


def test_loops_on_three_ranks() -> None:
    check(_loops, 3)


# --- a plain loop, hand-made accumulation, exceptions ------------------------------------------------------------------


def plain(model: nn.Module, batches: list[list[list[Tensor]]], lr: float = 0.1) -> dict[str, Tensor]:
    """batches [step][micro][rank]: weights after SGD on the mean of them all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in batches:
        count = sum(len(micro) for micro in step)
        for micro in step:
            for x in micro:
                (model(x).square().mean() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def _batches(steps: int, micros: int, ranks: int) -> list[list[list[Tensor]]]:
    return [[[Where(s, m, r, ranks).data(5, D) for r in range(ranks)] for m in range(micros)] for s in range(steps)]


SGD = {"type": "SGD", "params": {"lr": 0.1}}


def _make(mesh: Any, stage: int, bucket: int | None, build: Callable[[], nn.Module] = mlp, **config: Any) -> Any:
    case = Case("", build, lambda m, w: m, optimizer=SGD)
    return zeroengine.initialize(model=fresh(build), config={**settings(case, stage, bucket), **config}, mesh=mesh)[0]


def _compare(label: str, engine: Any, expected: dict[str, Tensor], faults: list[str], tolerance: float = 1e-6) -> None:
    worst, who = difference(whole_weights(engine), expected)
    if not worst <= tolerance:
        faults.append(f"{label}: weights differ by {worst:.2e} in {who}")


class Fails(nn.Module):
    """Raises in the middle of forward, when told."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = mlp(), nn.Linear(D, D)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.fail:
            self.inner[2](x[:, :2])  # shapes do not fit: raises inside of a module that owns parameters
        return self.last(x)


def _by_hand(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    expected = plain(fresh(mlp), _batches(2, 3, ranks))
    for stage in STAGES:
        for bucket in (TINY, DEFAULT):
            label = f"stage {stage} bucket {bucket}"
            # a plain torch loop: three backward calls a step
            engine = _make(mesh, stage, bucket)
            for step in _batches(2, 3, ranks):
                for micro in step:
                    (engine(micro[rank]).square().mean() / 3).backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            _compare(f"plain loop {label}", engine, expected, faults)
            engine.destroy()
            # no_sync
            engine = _make(mesh, stage, bucket, gradient_accumulation_steps=3)
            for step in _batches(2, 3, ranks):
                for i, micro in enumerate(step):
                    if i < 2:
                        with engine.no_sync():
                            engine.backward(engine(micro[rank]).square().mean())
                            engine.step()
                    else:
                        engine.backward(engine(micro[rank]).square().mean())
                        engine.step()
            _compare(f"no_sync {label}", engine, expected, faults)
            engine.destroy()
            # torch's way: the context alone says which backward ends the step; whole gradients are not reduced before
            engine = _make(mesh, stage, bucket)
            for step in _batches(2, 3, ranks):
                for i, micro in enumerate(step):
                    engine.reset_traffic()
                    with contextlib.nullcontext() if i == 2 else engine.no_sync():
                        (engine(micro[rank]).square().mean() / 3).backward()
                    if stage < 2 and bool(engine.traffic()["total"]) != (i == 2):
                        faults.append(f"torch's no_sync {label}: {engine.traffic()} in micro-batch {i}")
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            _compare(f"torch's no_sync {label}", engine, expected, faults)
            engine.destroy()
            # the boundary set by hand, with a forgotten attempt before
            engine = _make(mesh, stage, bucket)
            for step in _batches(2, 3, ranks):
                engine.backward(engine(torch.ones(5, D) * (rank + 1)).square().mean())
                engine.zero_grad()
                for i, micro in enumerate(step):
                    engine.set_gradient_accumulation_boundary(i == 2)
                    engine.backward(engine(micro[rank]).square().mean() / 3)
                    engine.step()
            _compare(f"boundary {label}", engine, expected, faults)
            if engine.global_steps != 2:
                faults.append(f"boundary {label}: {engine.global_steps} steps")
            engine.destroy()
    return faults


def test_accumulation_by_hand() -> None:
    check(_by_hand)


def _after_exceptions(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    expected = plain(fresh(Fails), _batches(2, 1, ranks))
    for stage in STAGES:
        for bucket in (TINY, DEFAULT):
            engine = _make(mesh, stage, bucket, Fails)
            for ((x,),) in [[micro[rank : rank + 1] for micro in step] for step in _batches(2, 1, ranks)]:
                for context in (torch.enable_grad(), torch.no_grad()):
                    engine.module.fail = True
                    with context, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                        engine(x)
                engine.module.fail = False
                engine.backward(engine(x).square().mean())
                engine.step()
            _compare(f"after an exception, stage {stage} bucket {bucket}", engine, expected, faults)
            if stage == 3 and engine.memory_report()["working"] > 4 * 4 * 400:
                faults.append(f"gathered after an exception: {engine.memory_report()}")
            engine.destroy()
    return faults


def test_a_step_after_an_exception_in_forward() -> None:
    check(_after_exceptions)


def _unused_then_forgotten(rank: int, ranks: int) -> list[str]:
    """Ranks have launched different reductions when the gradients are thrown away."""
    mesh, faults = one_mesh(), []
    for stage in (0, 1, 2):
        engine = _make(mesh, stage, TINY, Branches)
        for forget in (engine.zero_grad, engine.optimizer.zero_grad):
            engine(torch.ones(2, D), [0, 1, 2] if rank == 0 else [1]).sum().backward()
            forget()
        engine.backward(engine(torch.ones(2, D), [0, 1, 2]).square().mean())
        engine.step()
        model = fresh(Branches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, D), [0, 1, 2]).square().mean().backward()
        optimizer.step()
        _compare(f"stage {stage}", engine, {n: p.detach() for n, p in model.named_parameters()}, faults)
        engine(torch.ones(2, D), [0, 1, 2] if rank == 0 else [1]).sum().backward()
        engine.destroy()
    return faults


def test_gradients_can_be_forgotten_at_any_time() -> None:
    check(_unused_then_forgotten)


# --- several engines ---------------------------------------------------------------------------------------------------


def _two_engines(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for stages in ((0, 3), (1, 1), (2, 3), (3, 3)):
        g, d = _make(mesh, stages[0], TINY), _make(mesh, stages[1], TINY, lambda: mlp(2))
        frozen = _make(mesh, 3, TINY, lambda: mlp(2).requires_grad_(False), optimizer=None)
        rg, rd = fresh(mlp), fresh(lambda: mlp(2))
        rf = fresh(lambda: mlp(2)).requires_grad_(False)
        og, od = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (rg, rd))
        for step in range(2):
            z = [Where(step, 0, r, ranks).data(4, D) for r in range(ranks)]
            # one generator step, then one discriminator step
            loss = d(g(z[rank])).square().mean()
            g.backward(loss)
            g.step()
            d.zero_grad()
            d.backward(d(g(z[rank]).detach()).abs().mean())
            d.step()
            for x in z:
                (rd(rg(x)).square().mean() / ranks).backward()
            og.step(), og.zero_grad(), od.zero_grad()
            for x in z:
                (rd(rg(x).detach()).abs().mean() / ranks).backward()
            od.step(), od.zero_grad()
            # one joint loss, with a frozen third model in between
            (d(frozen(g(z[rank]))).square().mean() + g(z[rank]).square().mean()).backward()
            g.step()
            d.step()
            for x in z:
                ((rd(rf(rg(x))).square().mean() + rg(x).square().mean()) / ranks).backward()
            og.step(), og.zero_grad(), od.step(), od.zero_grad()
        _compare(f"first engine {stages}", g, {n: p.detach() for n, p in rg.named_parameters()}, faults)
        _compare(f"second engine {stages}", d, {n: p.detach() for n, p in rd.named_parameters()}, faults)
        for e in (g, d, frozen):
            e.destroy()
    return faults


def test_two_engines_and_a_joint_loss() -> None:
    check(_two_engines)


def _hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called) for m in module.modules()) + sum(
        len(p._backward_hooks or ()) + len(p.__dict__) for p in module.parameters()
    )


def _again_and_again(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    model = fresh(mlp)
    identities = [id(p) for p in model.parameters()]
    mine = fresh(mlp)
    for i, stage in enumerate((3, 0, 2, 3, 1)):
        engine = zeroengine.initialize(model=model, config=settings(Case("", mlp, lambda m, w: m, optimizer=SGD), stage, TINY), mesh=mesh)[
            0
        ]
        for step in _batches(2, 1, ranks):
            engine.backward(engine(step[0][rank]).square().mean())
            engine.step()
        expected = plain(mine, _batches(2, 1, ranks))
        _compare(f"round {i}", engine, expected, faults)
        watched = weakref.ref(engine)
        engine.destroy()
        del engine
        gc.collect()
        if watched() is not None:
            faults.append(f"round {i}: the engine outlives destroy: {gc.get_referrers(watched())}")
        if _hooks(model):
            faults.append(f"round {i}: {_hooks(model)} hooks or attributes left")
        if [id(p) for p in model.parameters()] != identities or any(type(p) is not nn.Parameter for p in model.parameters()):
            faults.append(f"round {i}: parameters are not the same objects")
        worst, _ = difference({n: p.detach() for n, p in model.named_parameters()}, expected)
        if not worst <= 1e-6:
            faults.append(f"round {i}: after destroy weights differ by {worst:.2e}")
        model(torch.ones(1, D)).sum().backward()  # a plain module again
        if any(p.grad is None for p in model.parameters()):
            faults.append(f"round {i}: no gradients after destroy")
        model.zero_grad()
    return faults


def test_an_engine_is_made_again_on_the_same_module() -> None:
    check(_again_and_again)


def _eval_only(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    x = torch.ones(3, D)
    with torch.no_grad():
        expected = fresh(mlp)(x)
    for stage in STAGES:
        actor = _make(mesh, stage, TINY)
        helper = _make(mesh, stage, TINY, optimizer=None)
        for _ in range(2):
            with torch.no_grad():
                out = helper(x)
            with torch.inference_mode():
                again = helper(x)
            actor.backward((actor(x) - out).square().mean() + actor(x).abs().mean())
            actor.step()
            if not torch.equal(out, expected) or not torch.equal(again, expected):
                faults.append(f"stage {stage}: evaluation differs")
        report = helper.memory_report()
        if report["gradients"] or report["optimizer"]:
            faults.append(f"stage {stage}: {report}")
        with pytest.raises(ConfigError, match="no optimizer"):
            helper.step()
        actor.destroy()
        helper.destroy()
    return faults


def test_an_engine_for_evaluation_beside_one_that_trains() -> None:
    check(_eval_only)


def _stale(rank: int, ranks: int) -> list[str]:
    """A graph that was made before an update, or whose tensors were changed since, is refused: never other numbers."""
    mesh, faults = one_mesh(), []
    x = torch.ones(2, D)
    for stage, bucket in ((3, TINY), (3, DEFAULT), (0, DEFAULT), (1, TINY), (2, DEFAULT)):
        engine = _make(mesh, stage, bucket)
        old = engine(x).square().mean()
        engine.backward(engine(x).square().mean())
        engine.step()
        with pytest.raises(RuntimeError, match="between the forward and the backward|modified by an inplace operation"):
            engine.backward(old)
        engine.zero_grad()
        y = x.clone()
        loss = engine(y).square().mean()
        y.add_(1)
        with pytest.raises(RuntimeError, match="changed in place since forward|modified by an inplace operation"):
            engine.backward(loss)
        engine.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
        engine.destroy()
    return faults


def test_a_stale_graph_is_refused() -> None:
    check(_stale)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def _replace(model: nn.Module) -> None:
    model.b.weight.data = model.b.weight.data.clone()  # type: ignore[union-attr]


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str, tuple[int, ...]]] = {
    "unfrozen": (lambda m: m.a.requires_grad_(True), "'a.weight'", STAGES),
    "other memory": (_replace, "'b.weight' was given other memory", (0, 1, 2)),
    "added": (lambda m: m.add_module("c", nn.Linear(D, D)), "'c.weight' requires grad", STAGES),
}


def _changed(rank: int, ranks: int) -> list[str]:
    """A model that was changed under the engine: an error, never an update that has no effect."""
    mesh, faults = one_mesh(), []
    for name, (change, text, stages) in CHANGES.items():
        for stage in stages:
            engine = _make(mesh, stage, TINY, Frozen)
            change(engine.module)
            engine.backward(engine(torch.ones(2, D)).mean())
            try:
                engine.step()
                faults.append(f"{name} at stage {stage}: accepted")
            except ModelError as error:
                if text not in str(error):
                    faults.append(f"{name} at stage {stage}: {error}")
            engine.destroy()
    return faults


def test_a_model_that_was_changed_under_the_engine() -> None:
    check(_changed)


# --- copies of the module ----------------------------------------------------------------------------------------------


def _copies(rank: int, ranks: int) -> list[str]:
    """A copy of a module whose values are whole is a plain module: an exponential average of the weights, say."""
    mesh, faults = one_mesh(), []
    x = torch.ones(2, D)
    for stage in (0, 1, 2):
        engine = _make(mesh, stage, TINY)
        engine.backward(engine(x * (rank + 1)).square().mean())
        engine.step()
        there = io.BytesIO()
        torch.save(engine.module, there)
        there.seek(0)
        for name, other in {
            "deepcopy": copy.deepcopy(engine.module),
            "pickle": pickle.loads(pickle.dumps(engine.module)),
            "torch.save": torch.load(there, weights_only=False),
        }.items():
            engine.backward(engine(x).square().mean())
            before = engine.mechanism.reducer._backwards, engine.mechanism.reducer._dirty
            out = other(x)
            out.sum().backward()
            if (engine.mechanism.reducer._backwards, engine.mechanism.reducer._dirty) != before:
                faults.append(f"{name} stage {stage}: the copy acts on the engine")
            if not torch.equal(out, engine.module(x)) or any(p.grad is None for p in other.parameters()):
                faults.append(f"{name} stage {stage}: the copy is not like the module")
            if any("_zero" in p.__dict__ and p._zero is not None for p in other.parameters()):
                faults.append(f"{name} stage {stage}: the copy's parameters know the engine")
            engine.zero_grad()
        with torch.no_grad():
            for a, b in zip(other.parameters(), engine.module.parameters(), strict=True):
                a.lerp_(b, 0.5)
        F.mse_loss(other(x), x).backward()
        engine.destroy()
    return faults


def test_copies_of_the_module() -> None:
    check(_copies)
