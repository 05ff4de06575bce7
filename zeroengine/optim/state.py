"""What a torch optimizer keeps for its parameters: made, and carried over."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import ConfigError
from zeroengine.zero.layout import Piece

Held = tuple[nn.Parameter, Piece]
"""What the optimizer knows a parameter, or a part of it, by; and its name, its shape and where the part begins."""


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that has made steps: its ranks' states cannot be told apart. State from the constructor is
    fine (Adagrad's)."""
    for state in optimizer.state.values():
        if any(float(v) != 0 for k, v in state.items() if k == "step") or "step" not in state:
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} has state already; give zeroengine.initialize a fresh one and load a "
                "checkpoint with engine.load_checkpoint"
            )


def carry_state(
    optimizer: torch.optim.Optimizer, made: dict[str, Any], shape: torch.Size, views: list[nn.Parameter], starts: list[int]
) -> None:
    """Gives `views`, parts of one parameter that begin at elements `starts`, their parts of the state `made` for it."""
    for view, start in zip(views, starts, strict=True):
        for key, value in made.items():
            if isinstance(value, Tensor) and value.shape == shape and key != "step":
                part = value.reshape(-1)[start : start + view.numel()].reshape(view.shape)
                wide = part.dtype if not part.is_floating_point() else torch.promote_types(part.dtype, view.dtype)
                optimizer.state[view][key] = part.to(wide, copy=True)
            else:
                optimizer.state[view][key] = value.clone() if isinstance(value, Tensor) else value


# fp32 tensors of the parameter's size that torch's optimizers keep; options of the group decide where a range is given.
_MOMENTS = {
    "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "FusedAdagrad": 1, "FusedLion": 1,
    "Adadelta": 2, "ASGD": 1, "Rprop": 2,
}  # fmt: skip


def moments(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of a parameter's size `optimizer` keeps for it: known for torch's classes and ours, a guess for others."""
    return moments_of(type(optimizer).__name__, optimizer.defaults)


def moments_of(name: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> int:
    """`moments` of an optimizer's class name and defaults."""
    if name in ("SGD", "FusedSGD"):
        return 1 if defaults.get("momentum") else 0
    if name == "RMSprop":
        return 1 + int(bool(defaults.get("momentum"))) + int(bool(defaults.get("centered")))
    return _MOMENTS.get(name, 2) + int(bool(defaults.get("amsgrad")))


class NoChange:
    """Context in which a step of `optimizer` changes nothing but its state: zero gradients, learning rate and decay."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._kept: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self._kept = [{k: v for k, v in group.items() if k != "params"} for group in self._groups]
        for group in self._groups:
            for key in ("lr", "weight_decay"):
                if key in group:
                    group[key] = torch.zeros_like(group[key]) if isinstance(group[key], Tensor) else 0.0

    def __exit__(self, *_: object) -> None:
        for group, values in zip(self._groups, self._kept, strict=True):
            group.update(values)
