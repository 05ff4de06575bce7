"""Blocks of transformers with shared experts, which then run while tokens travel to the routed ones.

A block is known by the names that the code of its forward uses, in their order: that is the form of DeepSeek-V2 and -V3 and of all
that were made from them (GLM-4-MoE, dots.llm1, ...), or that of Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE. A block of another form keeps its
own code and runs its shared experts before or after the routed ones.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

_BASE = "_zero_base"


def _added(self: Any, hidden_states: Tensor) -> Tensor:
    """experts(x) + shared_experts(x), [..., H] to the same."""
    _, weights, index = self.gate(hidden_states)
    beside: list[Tensor] = []
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    out: Tensor = self.experts(flat, index, weights, lambda: beside.append(self.shared_experts(hidden_states)))
    return out.view(hidden_states.shape) + beside[0]


def _gated(self: Any, hidden_states: Tensor) -> Tensor:
    """experts(x) + sigmoid(shared_expert_gate(x)) * shared_expert(x), [..., H] to the same."""
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, index = self.gate(flat)
    beside: list[Tensor] = []

    def shared() -> None:
        beside.append(F.sigmoid(self.shared_expert_gate(hidden_states)) * self.shared_expert(hidden_states))

    out: Tensor = self.experts(flat, index, weights, shared)
    return out.view(hidden_states.shape) + beside[0]


_FORMS: dict[tuple[str, ...], Callable[[Any, Tensor], Tensor]] = {
    ("shape", "gate", "view", "experts", "shared_experts"): _added,
    ("shape", "view", "shared_expert", "gate", "experts", "F", "sigmoid", "shared_expert_gate", "reshape"): _gated,
}
"""By the names that a forward uses, the same in another order."""


_NUMBERS = {-1}
"""In that code."""


def overlap(block: nn.Module) -> bool:
    """Lets the shared experts of `block` run while tokens travel; False where its code is of no known form. The block stays the
    same object, with its hooks; a copy or a pickle of it is of its own class."""
    base = type(block)
    forward = _FORMS.get(_names(base))
    if forward is None:
        return False
    block.__class__ = type(f"Overlapped{base.__name__}", (base,), {"forward": forward, "__reduce_ex__": _as_plain, _BASE: base})
    return True


def restore(block: nn.Module) -> None:
    """Undoes `overlap`."""
    base = getattr(type(block), _BASE, None)
    if base is not None:
        block.__class__ = base


def _names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Attributes and globals that the code of `cls.forward` uses, in the order of their first use."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or {c for c in code.co_consts if isinstance(c, (int, float))} - _NUMBERS:
        return ()
    return tuple(code.co_names)


def _as_plain(self: Any, protocol: Any) -> tuple[Any, ...]:
    return copyreg.__newobj__, (getattr(type(self), _BASE),), self.__dict__  # type: ignore[attr-defined]
