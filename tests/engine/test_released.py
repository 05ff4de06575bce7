"""Stage 3: what a parameter is while its values are elsewhere, how much is gathered and when."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroengine
from tests.engine.versus_torch import DEFAULT, TINY, Where, check, difference, fresh, one_mesh, whole_weights
from zeroengine.errors import ReleasedParameterError
from zeroengine.zero.bucket import Residency

pytestmark = pytest.mark.ranks
D = 6


def make(mesh: Any, build: Callable[[], nn.Module], bucket: int | None = TINY, accumulation: int = 1, **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, **({"bucket_size": bucket} if bucket else {}), **zero},
    }
    return zeroengine.initialize(model=fresh(build), config=config, mesh=mesh)[0]


def layers(count: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(count)))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


READS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda p: p + 1,
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "item": lambda p: p[0].item(),
    "float": lambda p: float(p.sum()),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach() + 1,
    "clone": lambda p: p.clone(),
    "copy_": lambda p: p.data.copy_(torch.zeros_like(p)),
    "fill_": lambda p: nn.init.zeros_(p),
    "to": lambda p: p.to(torch.float64),
    "cpu": lambda p: p.cpu(),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "view": lambda p: p.view(-1),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "stack": lambda p: torch.stack([p, p]),
    "equal": lambda p: torch.equal(p, p),
    "==": lambda p: p == 0,
    "matmul": lambda p: torch.ones(1, p.shape[0]) @ p,
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "aten": lambda p: torch.ops.aten.add.Tensor(p, 1),
    "bool": lambda p: bool(p),
    "format": lambda p: f"{p.sum():.3f}",
}
MODULE_READS: dict[str, Callable[[nn.Module], Any]] = {
    "save of state_dict": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "values of state_dict": lambda m: [v.sum() for v in m.state_dict().values()],
    "copy of state_dict": lambda m: torch.empty(D, D).copy_(m.state_dict()["0.weight"]),
    "deepcopy": lambda m: copy.deepcopy(m),
    "pickle": lambda m: pickle.dumps(m),
    "double": lambda m: m.double(),
}


def _touch(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for bucket in (TINY, DEFAULT):
        engine = make(mesh, small, bucket)
        plain = fresh(small)
        for after in ("at first", "after a step"):
            for (name, p), q in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
                for what, read in READS.items():
                    try:
                        read(p)
                        faults.append(f"{what} of {name} {after}: no error")
                    except ReleasedParameterError as error:
                        if f"'{name}'" not in str(error):
                            faults.append(f"{what} of {name} {after}: {error}")
                    except Exception as error:
                        faults.append(f"{what} of {name} {after}: {type(error).__name__} {error}")
                facts = [
                    (t.shape, t.numel(), t.dtype, t.ndim, t.dim(), t.size(), t.device, t.requires_grad, t.is_leaf, t.stride(),
                     t.is_contiguous(), isinstance(t, nn.Parameter), isinstance(t, Tensor), t.nelement(), len(t), t.grad,
                     t.element_size(), t.is_floating_point(), torch.zeros_like(t).shape, t.nbytes, t.grad_fn)
                    for t in (p, q)
                ]  # fmt: skip
                if facts[0] != facts[1]:
                    faults.append(f"{name} {after}: {facts}")
                if name not in repr(p) or str(tuple(p.shape)) not in str(p):
                    faults.append(f"{name} {after}: printed as {p!r}")
                if p not in {p} or {p: 1}[p] != 1 or not any(p is x for x in engine.parameters()):
                    faults.append(f"{name} {after}: identity")
            for what, read_module in MODULE_READS.items():
                try:
                    read_module(engine.module)
                    faults.append(f"module {what} {after}: no error")
                except Exception as error:
                    if "is sharded and its values are not gathered" not in str(error):
                        faults.append(f"module {what} {after}: {type(error).__name__} {error}")
            engine.module.load_state_dict(plain.state_dict())  # needs no values: test_edits
            if sum(p.numel() for p in engine.parameters()) != sum(p.numel() for p in plain.parameters()):
                faults.append("number of elements")
            engine.backward(engine(torch.ones(2, D)).sum())
            engine.step()
        engine.destroy()
    return faults


def test_values_of_a_released_parameter_are_an_error_and_facts_are_not() -> None:
    check(_touch)


class Keeps(nn.Module):
    """Keeps views of weights, as a user's debugging code would."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept += [self.a.weight.detach().t(), self.c.bias.detach()[1:]]
        x = self.a(x)
        self.kept.append(self.b.weight.data)
        return self.c(self.b(x))


def _views(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for bucket in (TINY, DEFAULT):
        engine = make(mesh, Keeps, bucket)
        want = {n: p.detach().clone() for n, p in fresh(Keeps).named_parameters()}
        for _ in range(3):
            engine.backward(engine(torch.ones(3, D)).square().mean())
            engine.step()
        expected = [want["a.weight"].t(), want["c.bias"][1:], want["b.weight"]]
        if not all(torch.equal(k, e) for k, e in zip(engine.module.kept[:3], expected, strict=True)):
            faults.append(f"bucket {bucket}: views changed after release")
        engine.destroy()
    return faults


def test_views_stay_valid_after_release() -> None:
    check(_views)


class Watched:
    """Counts gathered buckets while modules run."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.most = engine, 0
        for module in engine.module.modules():
            module.register_forward_hook(self.look)
            module.register_full_backward_hook(self.look)

    def look(self, *_: Any) -> None:
        live = sum(b.residency is not Residency.RELEASED for b in self.engine.mechanism.buckets)
        self.most = max(self.most, live)


def _counts(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    calls = mesh.shard_params.traffic.calls
    for zero, bound, accumulation in (
        ({}, 3, 1), ({}, 3, 3), ({"stage3_prefetch_bucket_size": 0}, 2, 2), ({"stage3_max_live_parameters": 2 * D * D}, 2, 1),
    ):  # fmt: skip
        engine = make(mesh, layers, D * D, accumulation, **zero)
        if len(engine.mechanism.buckets) != 8:
            return [f"{len(engine.mechanism.buckets)} buckets"]
        watched = Watched(engine)
        for step in range(4):
            calls.clear()
            engine.reset_traffic()
            for micro in range(accumulation):
                engine.backward(engine(Where(step, micro, rank, ranks).data(3, D)).square().mean())
                engine.step()
            # forward reads 8; backward reads 8, or 7 when the last use in forward is still gathered
            gathers = calls["all_gather"] / accumulation
            if step and not 14 <= gathers <= 16:
                faults.append(f"{zero} x{accumulation} step {step}: {gathers} gathers a micro-batch")
            moved, planned = engine.traffic()["total"], engine.planned_traffic()
            if step and moved > planned:
                faults.append(f"{zero} x{accumulation} step {step}: {moved} bytes moved, planned {planned}")
            if any(b.residency is not Residency.RELEASED for b in engine.mechanism.buckets):
                faults.append(f"{zero} step {step}: gathered after the step")
        if watched.most > bound:
            faults.append(f"{zero} x{accumulation}: {watched.most} buckets gathered at one time")
        engine.destroy()
    return faults


def test_few_buckets_are_gathered_at_one_time() -> None:
    check(_counts)


def _persistent(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    engine = make(mesh, small, DEFAULT, stage3_param_persistence_threshold=10_000)
    mesh.shard_params.traffic.reset()
    for step in range(3):
        engine(torch.ones(2, D))
        out = engine(torch.ones(2, D))
        before = mesh.shard_params.traffic.calls["all_gather"]
        engine.backward(out.square().mean())
        if mesh.shard_params.traffic.calls["all_gather"] != step or before != step:
            faults.append(f"step {step}: {mesh.shard_params.traffic.calls} in forward and backward")
        engine.step()  # publishes the update: one gather
    engine.destroy()
    engine = make(mesh, small, DEFAULT, stage3_param_persistence_threshold=D + 1)
    kinds = {n: type(p) is nn.Parameter for n, p in engine.module.named_parameters()}
    if kinds != {"0.weight": False, "0.bias": True, "2.weight": False, "2.bias": True}:
        faults.append(f"persistent: {kinds}")
    engine.module[0].bias.sum()  # readable at any time
    expected = fresh(small)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, D)).square().mean())
        engine.step()
        expected(torch.ones(2, D)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    worst, who = difference(whole_weights(engine), {n: p.detach() for n, p in expected.named_parameters()})
    if not worst <= 1e-6:
        faults.append(f"weights differ by {worst:.2e} in {who}")
    engine.destroy()
    return faults


def test_small_parameters_stay_whole() -> None:
    check(_persistent)


def _freed(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    count, width = 6, 64
    engine = make(mesh, lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))), width * width)
    one = width * width * 4
    storages: list[Any] = []

    class Remember(nn.Module):
        pass

    def remember(module: Any, args: Any, output: Any) -> None:
        storages.append(weakref.ref(module.weight.untyped_storage()))

    for layer in engine.module:
        layer.register_forward_hook(remember)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, engine.memory_report()["working"])

    for layer in engine.module:
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    x = torch.ones(2, width)
    for _ in range(2):
        most = 0
        engine.backward(engine(x).mean())
        engine.step()
    graph = engine(x)  # a graph that still waits for its backward holds no weights
    resting = engine.memory_report()["working"]
    # free buffers for the next gathers, at most two of each kind (weights, gradients), and the communicators' own
    if resting > 6 * one:
        faults.append(f"{resting / one} buckets are held at rest")
    held = sum(b.full is not None for b in engine.mechanism.buckets)
    if held:
        faults.append(f"{held} buckets gathered at rest")
    if most > 9 * one:
        faults.append(f"{most / one} buckets held at one time")
    del graph
    engine.destroy()
    return faults


def test_released_buckets_are_freed() -> None:
    check(_freed)
