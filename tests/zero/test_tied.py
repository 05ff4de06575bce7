"""Gradients of a shared parameter are added up in place, and come out as they would otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroengine.zero.tied import add_in_place

V, W = 11, 6
IDS = torch.arange(8).view(2, 4)


class Tied(nn.Module):
    """Embedding and head of one weight; the head's output goes through `after`."""

    def __init__(self, *, bias: bool = False, after: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.emb = nn.Embedding(V, W)
        self.middle = nn.Linear(W, W)
        self.head = nn.Linear(W, V, bias=bias)
        self.head.weight = self.emb.weight
        self.after = after

    def forward(self, ids: Tensor) -> Tensor:
        return self.after(self.head(self.middle(self.emb(ids)))).sum()


def made(**kwargs: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**kwargs)


def sums(run: Callable[[], Any]) -> list[str]:
    """The additions of two tensors of the shared weight's shape that `run` makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run()
    return [e.name for e in profile.events() if e.name in ("aten::add", "aten::add_") and e.input_shapes[:2] == [[V, W], [V, W]]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ids", [IDS, IDS[0]], ids=["batch", "sequence"])
def test_the_sum_is_made_in_place_with_the_same_bits(bias: bool, ids: Tensor) -> None:
    plain, model = made(bias=bias), made(bias=bias)
    handles = list(add_in_place(model))
    assert sums(lambda: plain(ids).backward()) == ["aten::add"]
    assert sums(lambda: model(ids).backward()) == ["aten::add_"]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    for handle in handles:
        handle.remove()
    model.zero_grad()
    assert sums(lambda: model(ids).backward()) == ["aten::add"]


def test_a_gradient_that_somebody_keeps_is_not_written() -> None:
    plain, model = made(), made()
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        node = output.grad_fn
        while node.name() != "TBackward0":
            node = node.next_functions[-1][0]
        node.register_hook(lambda grads, _: kept.append(grads[0]))  # the gradient by the head alone

    list(add_in_place(model))
    model.head.register_forward_hook(keep)
    plain(IDS).backward()
    assert sums(lambda: model(IDS).backward()) == ["aten::add"]
    whole = plain.emb.weight.grad
    untied = made()
    untied.head.weight = nn.Parameter(untied.emb.weight.detach().clone())
    untied(IDS).backward()
    assert len(kept) == 1 and torch.equal(kept[0], untied.head.weight.grad) and torch.equal(model.emb.weight.grad, whole)


def test_gradients_of_gradients_are_those_of_torch() -> None:
    found = []
    for on in (False, True):
        model = made()
        if on:
            list(add_in_place(model))
        weight = model.emb.weight
        (first,) = torch.autograd.grad(model(IDS), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    assert torch.equal(*found) and bool(found[0].any())


def test_checkpointed_and_compiled_heads() -> None:
    plain, model = made(), made()
    plain(IDS).backward()
    list(add_in_place(model))
    assert sums(lambda: checkpoint(model, IDS, use_reentrant=False).backward()) == ["aten::add_"]
    assert torch.equal(model.emb.weight.grad, plain.emb.weight.grad)
    model.zero_grad()
    torch.compile(model, backend="eager", fullgraph=True)(IDS).backward()
    assert torch.equal(model.emb.weight.grad, plain.emb.weight.grad)


def test_only_modules_that_share_are_hooked() -> None:
    model = made()
    assert len(list(add_in_place(model))) == 2 and not model.middle._forward_hooks and not model._forward_hooks
    model = made()
    model.emb.weight.requires_grad_(False)
    assert not list(add_in_place(model))
