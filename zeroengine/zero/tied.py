"""Gradients of a parameter that several modules share, added up in place.

Autograd adds a second gradient of one parameter into the memory of the first if nothing else refers to that. What a linear
layer gives is a transposed view, which keeps the tensor it was made from: the sum would be a third tensor, of an embedding often the
largest of a backward. Here such a gradient is handed on without that tensor. Values are the same: autograd still adds the
second to the first, and makes a new tensor whenever the memory has other users.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroengine.zero.hooks import ModuleHook

_NODES = 16  # of the graph behind an output, in which the uses of a module's own parameters are looked for


def add_in_place(module: nn.Module) -> Iterator[Any]:
    """Lets the gradients of trainable parameters that several modules inside of `module` share be added up in place, whichever
    module's comes first. Yields handles to take this off."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for m in module.modules():
        for p in {p for p in m._parameters.values() if p is not None and p.requires_grad}:
            owners.setdefault(p, []).append(m)
    shared = {p for p, found in owners.items() if len(found) > 1}
    for m in dict.fromkeys(m for p in shared for m in owners[p]):
        yield m.register_forward_hook(ModuleHook(_after))


def _after(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    own = {id(p) for p in module._parameters.values() if p is not None}
    for node in _users(output, own):
        node.register_hook(_without_base)


def _users(output: Any, own: set[int]) -> list[Any]:
    """Nodes close behind `output` that give a parameter of `own` its gradient."""
    waiting = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None][:_NODES]
    seen, users = set(waiting), []
    for node in waiting:  # grows
        after = [n for n, _ in node.next_functions if n is not None]
        if any(id(getattr(n, "variable", None)) in own for n in after):
            users.append(node)
        for n in after:
            if n not in seen and len(waiting) < _NODES:
                seen.add(n)
                waiting.append(n)
    return users


def _without_base(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    if torch.is_grad_enabled():  # backward(create_graph=True) differentiates through the view
        return None
    return tuple(g.detach() if type(g) is Tensor and g._is_view() else g for g in grads)
