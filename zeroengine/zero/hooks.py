"""A forward hook that belongs to one module object and not to copies of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
