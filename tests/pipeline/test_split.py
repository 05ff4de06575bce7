"""Backward in two parts gives what backward in one gives, and computes nothing twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroengine.pipeline.split import input_gradients


class Twice(nn.Module):
    """One layer used twice, one below the other, and a normalisation whose weight is used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(F.gelu(self.linear(self.norm(x)))))


class Loose(nn.Module):
    """A second output that does not depend on the input, and a term without input inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        row = self.linear(self.table(torch.arange(3)))
        return self.linear(x) * row.mean() + self.table.weight[0], row


class Parallel(nn.Module):
    """One weight in two branches side by side, a frozen layer, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.a(x), self.a(x * 2)
        return self.frozen(F.scaled_dot_product_attention(q, k, x))


class Hooked(nn.Module):
    """Weights used in two places, below one another and side by side, whose hooks must see their whole gradient once."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.beside = nn.Linear(6, 6), nn.Linear(6, 6)
        self.below.weight.register_hook(lambda grad: 3 * grad)
        self.beside.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))

    def forward(self, x: Tensor) -> Tensor:
        y = self.below(torch.tanh(self.below(x)))
        y.register_hook(lambda grad: grad / 2)
        return self.beside(y) * torch.tanh(self.beside(y + 1))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def outputs_of(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))


@pytest.mark.parametrize("make", [chain, Twice, Loose, Parallel, Hooked, Recomputed])
def test_equal_to_backward_in_one(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(2, 5, 6, requires_grad=True)
    outputs = outputs_of(model(x))
    grads = [torch.randn_like(o) for o in outputs]
    torch.autograd.backward(outputs, grads)
    expected = {n: p.grad for n, p in model.named_parameters()}
    expected_x, x.grad = x.grad, None
    fired: list[str] = []
    for name, p in model.named_parameters():
        p.grad = None
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    found, task = input_gradients(outputs_of(model(x)), grads, [x])
    assert found[0] is not None and torch.allclose(found[0], expected_x, atol=1e-6)
    assert not fired and all(p.grad is None for p in model.parameters())
    task.run()
    for name, p in model.named_parameters():
        if expected[name] is None:
            assert p.grad is None
            continue
        assert name in fired and p.grad is not None and torch.allclose(p.grad, expected[name], atol=1e-6), name


def test_each_part_multiplies_once() -> None:
    """Of the two products of a linear layer's backward each part makes one."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    x = torch.randn(4, 8, requires_grad=True)
    one = 2 * 4 * 8 * 8
    output = model(x)
    with FlopCounterMode(display=False) as first:
        _, task = input_gradients([output], [torch.ones_like(output)], [x])
    with FlopCounterMode(display=False) as second:
        task.run()
    assert first.get_total_flops() == 4 * one and second.get_total_flops() == 4 * one


def test_without_inputs_everything_comes_later() -> None:
    model = nn.Linear(3, 3)
    output = model(torch.ones(2, 3))
    found, task = input_gradients([output], [torch.ones_like(output)], [])
    assert found == [] and model.weight.grad is None
    task.run()
    assert torch.equal(model.weight.grad, torch.full((3, 3), 2.0))  # type: ignore[arg-type]
