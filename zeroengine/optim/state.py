"""What a torch optimizer keeps for its parameters: made, and carried over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.config import OptimizerSection
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


# fp32 tensors of a parameter's size that optimizers keep, where it is not 2 as of Adam's family. Adafactor keeps rows and columns of
# matrices; Muon's number is that of matrices, what it leaves to AdamW has 2.
_MOMENTS = {"Adagrad": 1, "Lion": 1, "ASGD": 1, "Muon": 1, "MuonWithAdamW": 1, "Adafactor": 0}


def moments(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of a parameter's size `optimizer` keeps for it: known for torch's classes and ours, a guess for others."""
    return _moments(type(optimizer).__name__, optimizer.defaults)


def moments_of(section: OptimizerSection | None) -> int:
    """The same of the optimizer that a configuration asks for; one that is given in code (None) is taken for Adam."""
    return 2 if section is None else _moments(section.type, section.params)


def _moments(name: str, options: Mapping[str, Any]) -> int:
    name = name.removeprefix("Fused").removeprefix("CPU")
    if name == "SGD":
        return 1 if options.get("momentum") else 0
    if name == "RMSprop":
        return 1 + int(bool(options.get("momentum"))) + int(bool(options.get("centered")))
    return _MOMENTS.get(name, 2) + int(bool(options.get("amsgrad")))


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
