"""Native operations and their twins in torch. Names are resolved on first use: building needs no torch."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "CPUAdam": "adam",
    "DeepSpeedCPUAdam": "adam",
    "FusedAdam": "adam",
    "CPULion": "lion",
    "DeepSpeedCPULion": "lion",
    "FusedLion": "lion",
    "CPUAdagrad": "adagrad",
    "DeepSpeedCPUAdagrad": "adagrad",
    "FusedAdagrad": "adagrad",
    "FusedSGD": "sgd",
    "library": "build",
    "choose": "registry",
    "update": "flat",
    "cast": "flat",
    "squares": "flat",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'zeroengine.ops' has no attribute {name!r}")
