"""Names of optimizers and schedules: one spelling each, whatever the case; some that compute something else."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from zeroengine.wording import did_you_mean

OPTIMIZERS = (
    "Adam", "AdamW", "SGD", "Lamb", "Lion", "Adagrad", "Muon", "Adafactor",
    "ASGD", "Adadelta", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam",
)  # fmt: skip
SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_COMPRESSED = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}
_WIDTH_SCALED = ("muadam", "muadamw", "musgd")


class RefusedValue(ValueError):
    """A value that is understood, and would change the result."""


def optimizer_name(name: str) -> str:
    """The spelling in `OPTIMIZERS`, or `name` if it is a class of this `torch.optim`. Raises ValueError otherwise,
    `RefusedValue` for those that compute something else."""
    lower = name.lower()
    if lower in _COMPRESSED:
        raise RefusedValue(
            "the 1-bit optimizers send approximate gradients, which changes the result; write "
            f'"{_COMPRESSED[lower]}" and remove the parameters that only they know'
        )
    if lower in _WIDTH_SCALED:
        raise RefusedValue(
            "the Mu optimizers scale the learning rate by layer width; build one from the mup package and "
            "pass it to initialize(optimizer=...)"
        )
    return _known(name, OPTIMIZERS, "torch.optim", "Optimizer")


def schedule_name(name: str) -> str:
    """The spelling in `SCHEDULES`, or `name` as `torch.optim.lr_scheduler` spells it. Raises ValueError otherwise."""
    return _known(name, SCHEDULES, "torch.optim.lr_scheduler", "LRScheduler")


def _known(name: str, names: Iterable[str], module: str, base: str) -> str:
    by_lower = {known.lower(): known for known in names}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    found = importlib.import_module(module)  # only a name that is not ours needs torch, and importing torch is slow
    parent = getattr(found, base)
    for known, value in vars(found).items():
        if isinstance(value, type) and issubclass(value, parent) and value is not parent and not known.startswith("_"):
            by_lower[known.lower()] = known
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    hint = did_you_mean(name, by_lower.values(), "known are " + ", ".join(sorted(by_lower.values())))
    raise ValueError(f"expected a name known here or in {module}; {hint}")
