"""What a torch optimizer needs to see of a parameter: any part of it, or the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroengine.errors import ConfigError

_ELEMENTWISE = frozenset({"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "SGD"})
_REFUSED = {
    "LBFGS": (
        "evaluates the loss again and again inside step through a closure, and works on the flat vector of all parameters; "
        "gradients here are reduced while backward runs, once a step. Use Adam, AdamW, SGD or another optimizer "
        "whose step takes no closure"
    ),
    "SparseAdam": (
        "takes sparse gradients only, and gradients are reduced over the ranks as dense ones; use Adam or AdamW "
        "(sparse gradients of an embedding are accepted and made dense)"
    ),
}


def is_elementwise(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether `cls` updates each element of the parameters of `group` by itself, so that parts of them are right.

    A class declares it with an attribute `elementwise`: a bool, or a static function of a parameter group. torch's
    classes are known; any other class is given whole parameters, which is right for all.
    """
    declared = getattr(cls, "elementwise", None)
    if callable(declared):
        return bool(declared(group))
    if isinstance(declared, bool):
        return declared
    return cls.__name__ in _ELEMENTWISE and cls.__module__.startswith("torch.optim")


def steps_apart(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether parameters may be stepped one after another, by several calls of `step` in which the others have no
    gradient. It bounds the memory of the update. A class that counts steps by parameter, not by group or call, declares
    it with an attribute `steps_apart = True`; torch's do so."""
    return bool(getattr(cls, "steps_apart", cls.__module__.startswith("torch.optim")))


def sees_matrices(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether `cls` updates each of a stack of experts' parameters by itself, so that some of the experts are right. A class
    declares it with an attribute `stacks_apart = True`; it knows a stack by `zeroengine.zero.experts.is_stack`."""
    return bool(getattr(cls, "stacks_apart", False))


def check_usable(cls: type[torch.optim.Optimizer]) -> None:
    """Raises `ConfigError` for torch's classes that no stage can serve, with the reason."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _REFUSED:
            raise ConfigError(f"optimizer {cls.__name__} {_REFUSED[base.__name__]}")
