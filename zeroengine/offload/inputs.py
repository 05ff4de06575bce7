"""Recomputed segments whose inputs wait for backward in memory of the host (`activation_checkpointing.cpu_checkpointing`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zeroengine.logging import log_once
from zeroengine.offload.activations import OnHost

NO_EFFECT = (
    "activation_checkpointing.cpu_checkpointing: nothing is moved, because the device of this run is the CPU: the inputs of "
    "recomputed segments are in memory of the host already"
)

_on_host: ContextVar[bool] = ContextVar("inputs of recomputed segments wait on the host", default=False)


@contextlib.contextmanager
def inputs_on_host(wanted: bool) -> Iterator[None]:
    """Context of a forward: what is `recomputed` inside keeps its inputs on the host, if `wanted`."""
    before = _on_host.set(_on_host.get() or wanted)
    try:
        yield
    finally:
        _on_host.reset(before)


def on_accelerator(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def recomputed(function: Callable[..., Any], *args: Any, moves: Callable[[Tensor], bool] = on_accelerator) -> Any:
    """Runs `function(*args)` without keeping its activations, and again in backward, with the same random numbers.

    Inside `inputs_on_host(True)` those tensors in `args` that `moves` says wait for backward on the host; parameters stay. What else
    refers to such a tensor, the output of the segment before for example, decides whether the device's memory becomes free.
    """
    if not (_on_host.get() and torch.is_grad_enabled()):
        return checkpoint(function, *args, use_reentrant=False)
    leaves, shape = tree_flatten(args)
    held = [_Waiting(a) if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and moves(a) else a for a in leaves]
    if not any(isinstance(h, _Waiting) for h in held):
        log_once(NO_EFFECT)
        return checkpoint(function, *args, use_reentrant=False)

    def segment(*_: Tensor) -> Any:
        return function(*tree_unflatten([h.take() if isinstance(h, _Waiting) else h for h in held], shape))

    # Empty tensors tell torch whose random states to keep, and nothing else is kept for the second run.
    devices = {a.device for a in leaves if isinstance(a, Tensor)}
    return checkpoint(segment, *(torch.empty(0, device=device) for device in devices), use_reentrant=False)


class _Waiting:
    """An input: the tensor itself for the forward, and from then on a copy on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._first: Tensor | None = tensor
        self._requires_grad = tensor.requires_grad
        self._copy = OnHost(tensor, pin=tensor.device.type != "cpu")

    def take(self) -> Tensor:
        first, self._first = self._first, None
        return first if first is not None else self._copy.unpack().requires_grad_(self._requires_grad)
