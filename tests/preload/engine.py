"""For nearly all ranks: torch, this package and transformers. Nothing here uses what it imports, so a forked rank begins as a new one."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

# A library that asks for GPUs while it is imported must not start CUDA here: forks could not use it any more.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# What the engine imports, what torch imports when the first optimizer is made, and what modules of tests import.
ALWAYS = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.utils.checkpoint", "torch.utils.flop_counter",
    "hypothesis.strategies", "pytest",
    "zeroengine.checkpoint", "zeroengine.engine.initialize", "zeroengine.moe", "zeroengine.moe.hf", "zeroengine.ops", "zeroengine.optim",
    "zeroengine.pipe", "zeroengine.sequence", "zeroengine.zero", "tests.ranks",
)  # fmt: skip
MODELS = ("bert", "gemma3", "gpt2", "llama", "mistral", "mixtral", "qwen2")
WHERE_THERE = ("transformers.models.auto", *(f"transformers.models.{name}.modeling_{name}" for name in MODELS))


def load(*where_there: str) -> None:
    """Imports `ALWAYS`, and of `where_there` what is installed."""
    try:
        for name in ALWAYS:
            importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"{__name__}: {error}") from error  # the server would go on without, and every rank import for itself
    for name in where_there:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, the pages of all these objects


load(*WHERE_THERE)
