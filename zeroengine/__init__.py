"""zeroengine: a PyTorch training engine centred on ZeRO sharding.

Names are resolved on first use, so that `zerorun --help` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "initialize": "zeroengine.engine.initialize",
    "add_config_arguments": "zeroengine.engine.initialize",
    "ZeroEngine": "zeroengine.engine.engine",
    "init_distributed": "zeroengine.comm",
    "Config": "zeroengine.config",
}
_SUBMODULES = ("checkpoint", "comm", "config", "engine", "moe", "ops", "optim", "pipe", "sequence", "utils", "zero")

__all__ = ["__version__", *_EXPORTS, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"zeroengine.{name}")
    raise AttributeError(f"module 'zeroengine' has no attribute {name!r}")
