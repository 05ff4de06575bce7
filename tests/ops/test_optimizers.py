"""The fused optimizers: against torch's classes, native against twin, and their contracts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.ops.values import assert_same_bits
from tests.ranks import run_ranks
from zeroengine.comm import init_distributed
from zeroengine.errors import ConfigError
from zeroengine.ops import CPUAdagrad, CPUAdam, CPULion, DeepSpeedCPUAdam, FusedAdagrad, FusedAdam, FusedLion, FusedSGD, flat
from zeroengine.ops.optimizer import FusedOptimizer

SHAPES = ((33, 7), (5,), (), (130, 11), (0, 3))
Make = Callable[[list[Any]], torch.optim.Optimizer]

PAIRS: dict[str, tuple[Make, Make]] = {
    "adamw": (
        lambda p: FusedAdam(p, 1e-2, weight_decay=0.1, betas=(0.8, 0.95)),
        lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, betas=(0.8, 0.95)),
    ),
    "adam": (
        lambda p: FusedAdam(p, 1e-2, weight_decay=0.1, adam_w_mode=False),
        lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    ),
    "amsgrad": (
        lambda p: CPUAdam(p, 1e-2, amsgrad=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, weight_decay=0.1),
    ),
    "adagrad": (
        lambda p: FusedAdagrad(p, 1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2, eps=1e-8),
        lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.2, eps=1e-8),
    ),
    "sgd": (lambda p: FusedSGD(p, 0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    "momentum": (
        lambda p: FusedSGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    ),
    "nesterov": (
        lambda p: FusedSGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
}


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, steps: range, **options: Any) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step(**options)
    return [p.detach().clone() for p in params]


@pytest.fixture(params=["auto", "twin"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ZE_OPS", request.param)
    return str(request.param)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_torch(name: str, dtype: torch.dtype, implementation: str) -> None:
    ours, theirs = PAIRS[name]
    a, b = run(ours(parameters(dtype)), range(8)), run(theirs(parameters(dtype)), range(8))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_lion_by_hand(implementation: str) -> None:
    p, m = torch.tensor([1.0, -2.0, 0.5]), torch.zeros(3)
    held = nn.Parameter(p.clone())
    optimizer = FusedLion([held], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(6):
        g = torch.tensor([1.0, -1.0, 0.0]) * (-1) ** step * (step + 1)
        held.grad = g
        optimizer.step()
        p = p * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(held.detach(), p)
    torch.testing.assert_close(optimizer.state[held]["exp_avg"], m)


@pytest.mark.parametrize("name", [*PAIRS, "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_and_twin_give_the_same_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Make = (lambda p: FusedLion(p, weight_decay=0.1)) if name == "lion" else PAIRS[name][0]
    results = []
    for mode in ("auto", "twin"):
        monkeypatch.setenv("ZE_OPS", mode)
        results.append(run(make(parameters(dtype)), range(4), grad_scale=1 / 3))
    for x, y in zip(*results, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_and_foreign_gradients(dtype: torch.dtype, implementation: str) -> None:
    params, plain = parameters(), parameters()
    copies: dict[Tensor, Tensor] = {p: torch.full(p.shape, 7.0, dtype=dtype) for p in params[:4]}
    grads: dict[Tensor, Tensor] = {p: g.to(dtype) for p, g in zip(params, gradients(0), strict=True)}
    a, b = FusedAdam(params), FusedAdam(plain)
    for p, q in zip(params, plain, strict=True):
        q.grad = grads[p].float() * 0.25
    a.step(grad_scale=0.25, copies=copies, grads=grads)
    b.step()
    for p, q in zip(params, plain, strict=True):
        assert_same_bits(p.detach(), q.detach())
    for p, to in copies.items():
        assert_same_bits(to, p.detach().to(dtype))
    assert all(p.grad is None for p in params)


def test_grad_scale_as_a_tensor_leaves_gradients(implementation: str) -> None:
    params, plain = parameters(), parameters()
    a, b = FusedAdam(params), FusedAdam(plain)
    before = gradients(0)
    run(a, range(1), grad_scale=torch.tensor(0.3))
    run(b, range(1), grad_scale=0.3)
    for p, q, g in zip(params, plain, before, strict=True):
        assert_same_bits(p.detach(), q.detach())
        assert p.grad is not None and torch.equal(p.grad, g)


def test_groups_schedules_and_missing_gradients(implementation: str) -> None:
    def build(cls: Any) -> tuple[list[nn.Parameter], Any, Any]:
        params = parameters()
        groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 0.05}]
        optimizer = cls(groups, lr=0.01, weight_decay=0.1)
        return params, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    (a, ours, s), (b, theirs, t) = build(FusedAdam), build(torch.optim.AdamW)
    for step in range(5):
        for params in (a, b):
            for i, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
                p.grad = None if (step + i) % 3 == 0 else g
        ours.step(), theirs.step()
        s.step(), t.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert [float(ours.state[p]["step"]) for p in a] == [float(theirs.state[p]["step"]) for p in b]


@pytest.mark.parametrize("name", PAIRS)
def test_state_goes_to_torch_and_back(name: str) -> None:
    ours, theirs = PAIRS[name]
    reference = run(theirs(parameters()), range(6))
    for first, second in ((ours, theirs), (theirs, ours), (ours, ours)):
        params = parameters()
        before = first(params)
        run(before, range(3))
        file = io.BytesIO()
        torch.save(before.state_dict(), file)
        file.seek(0)
        after = second([nn.Parameter(p.detach().clone()) for p in params])
        after.load_state_dict(torch.load(file))
        for x, y in zip(run(after, range(3, 6)), reference, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


def test_resuming_16_bit_parameters_keeps_the_moments() -> None:
    whole = run(FusedAdam(parameters(torch.bfloat16)), range(6))
    params = parameters(torch.bfloat16)
    before = FusedAdam(params)
    run(before, range(3))
    after = FusedAdam(params)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert all(s["exp_avg"].dtype is torch.float32 for s in after.state.values())
    for x, y in zip(run(after, range(3, 6)), whole, strict=True):
        assert_same_bits(x, y)


def test_state_names_are_torchs() -> None:
    for name, (ours, theirs) in PAIRS.items():
        a, b = ours(parameters()), theirs(parameters())
        run(a, range(1)), run(b, range(1))
        for p, q in zip(a.state.values(), b.state.values(), strict=True):
            assert set(p) == set(q), name


@pytest.mark.parametrize("step", [3, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64), torch.tensor(3.0)], ids=repr)
def test_steps_of_every_kind_are_counted_on(step: Any, implementation: str) -> None:
    """As other libraries and older files keep them; the count is a 0-dim fp32 tensor from then on."""
    params, plain = parameters(), parameters()
    a, b = FusedAdam(params), FusedAdam(plain)
    run(a, range(3)), run(b, range(3))
    for state in a.state.values():
        state["step"] = copy.deepcopy(step)
    for x, y in zip(run(a, range(3, 5)), run(b, range(3, 5)), strict=True):
        assert_same_bits(x, y)
    for state in a.state.values():
        assert state["step"].dtype is torch.float32 and state["step"].shape == () and state["step"] == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: FusedAdam(p, lr=-1), "lr=-1"),
        (lambda p: FusedAdam(p, betas=(0.9, 1.0)), r"betas\[1\]"),
        (lambda p: FusedAdam(p, eps=float("nan")), "eps"),
        (lambda p: CPUAdam(p, fp32_optimizer_states=False), "fp32_optimizer_states"),
        (lambda p: CPULion(p, fp32_optimizer_states=False), "fp32_optimizer_states"),
        (lambda p: CPUAdagrad(p, amsgrad=True), "amsgrad"),
        (lambda p: FusedSGD(p, nesterov=True), "momentum above 0"),
    ],
)
def test_wrong_options(make: Make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(parameters())


def test_what_cannot_be_updated_changes_nothing() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    for p, g in zip(params, gradients(0), strict=True):
        p.grad = g
    before = [p.detach().clone() for p in params]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"copies": {params[3]: torch.zeros(3)}}, "parameter 3 of group 0.*copy"),
        ({"grads": {params[3]: torch.zeros(3)}}, "parameter 3 of group 0.*gradient"),
        ({"grads": {params[3]: torch.zeros(SHAPES[3], dtype=torch.int64)}}, "real floating-point"),
        ({"grads": {params[3]: torch.zeros(SHAPES[3]).to_sparse()}}, "sparse"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            optimizer.step(**options)
    assert not optimizer.state
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_state_of_another_kind_is_refused() -> None:
    theirs = torch.optim.Adam(parameters(), maximize=True)
    with pytest.raises(ConfigError, match="maximize"):
        FusedAdam(parameters(), adam_w_mode=False).load_state_dict(theirs.state_dict())
    with pytest.raises(ConfigError, match="decoupled_weight_decay"):
        FusedAdam(parameters()).load_state_dict(torch.optim.Adam(parameters()).state_dict())


def test_a_refused_state_changes_nothing() -> None:
    optimizer = FusedAdam(parameters(), lr=0.5)
    theirs = torch.optim.Adam(parameters(), lr=0.9)
    with pytest.raises(ConfigError, match="decoupled_weight_decay"):
        optimizer.load_state_dict(theirs.state_dict())
    with pytest.raises(ConfigError, match="decoupled_weight_decay"):
        optimizer.load_state_dict(FusedAdam(parameters(), lr=0.9, adam_w_mode=False).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.adam_w_mode
    with pytest.raises(ConfigError, match="maximize"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "maximize": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_copies_of_an_optimizer_go_on(adam_w_mode: bool) -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = FusedAdam([p], lr=0.1, weight_decay=0.1, adam_w_mode=adam_w_mode)
    p.grad = torch.full((5,), 0.5)
    optimizer.step()
    (q, other), (r, third) = copy.deepcopy((p, optimizer)), pickle.loads(pickle.dumps((p, optimizer)))
    for x, o in ((p, optimizer), (q, other), (r, third)):
        x.grad = torch.full((5,), 0.25)
        o.step()
        assert o.adam_w_mode is adam_w_mode
    assert torch.equal(p, q) and torch.equal(p, r)


def test_tensors_without_memory_of_their_own(implementation: str) -> None:
    p = nn.Parameter(TwoTensor(torch.ones(100), torch.ones(100)))
    p.grad = TwoTensor(torch.ones(100), torch.full((100,), 2.0))
    FusedSGD([p], lr=0.5).step()
    assert torch.equal(p.a, torch.full((100,), 0.5)) and torch.equal(p.b, torch.zeros(100))


def _of_dtensors(rank: int, world: int) -> tuple[Tensor, Tensor, bool]:
    init_distributed(verbose=False)
    mesh = init_device_mesh("cpu", (world,))
    whole, gradient = torch.arange(7.0).reshape(7, 1), torch.linspace(-1, 1, 7).reshape(7, 1)
    alone = nn.Parameter(whole.clone())
    p = nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
    optimizer, expected = FusedAdam([p], lr=0.1, weight_decay=0.1), FusedAdam([alone], lr=0.1, weight_decay=0.1)
    native = flat.update_library(torch.device("cpu")) is not None
    twin = flat._update_by_twin
    if native:
        flat._update_by_twin = None  # type: ignore[assignment]  # not to be called
    for placement in (Shard(0), Replicate()):
        p.grad = distribute_tensor(gradient, mesh, [placement])
        alone.grad = gradient
        before = p._version
        optimizer.step()
        assert p._version > before  # autograd has to notice
        expected.step()
        flat._update_by_twin = twin  # for a gradient that lies elsewhere than its parameter
    return p.full_tensor().detach(), alone.detach(), isinstance(optimizer.state[p]["exp_avg"], DTensor)


def test_dtensors_are_updated_where_they_lie() -> None:
    for found, expected, sharded in run_ranks(_of_dtensors, 2, timeout=60):
        assert sharded
        assert_same_bits(found, expected)


def test_gradients_that_torch_negates_lazily(implementation: str) -> None:
    p = nn.Parameter(torch.ones(1))
    p.grad = torch._neg_view(torch.full((1,), 2.0))
    FusedSGD([p], lr=1.0).step()
    assert p.item() == 3.0
    assert flat.squares([p.grad])[0].item() == 4.0
    to = torch.zeros(1)
    flat.cast([to], [p.grad])
    assert to.item() == -2.0


def test_a_closure_and_autograd_see_the_step() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = FusedSGD([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    torch.testing.assert_close(p.detach(), torch.tensor([1.6]))
    stale = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_they_say_that_they_are_elementwise() -> None:
    assert DeepSpeedCPUAdam is CPUAdam
    for cls in (FusedAdam, CPUAdam, FusedLion, CPULion, FusedAdagrad, CPUAdagrad, FusedSGD):
        assert issubclass(cls, FusedOptimizer) and cls.elementwise is True
