"""A forward hook that belongs to one module object and not to copies of it; whether forwards run inside backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def in_backward() -> bool:
    """Autograd runs a backward in this thread: a forward now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def recomputes(module: nn.Module) -> bool:
    """Whether a module of transformers inside of `module` runs again in backward, instead of keeping its activations."""
    return any(getattr(m, "gradient_checkpointing", False) is True for m in module.modules())


class ModuleHook:
    """Calls `act`. A deep copy or a pickle of the module gets a hook that does nothing: it is a plain module, and must
    neither carry the engine along nor act on it."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()
