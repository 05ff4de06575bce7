"""`deepspeed.comm.init_distributed` and `is_initialized`, for accelerate as well."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from zeroengine import comm


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """`zeroengine.init_distributed`. NCCL gets Gloo beside it, for the tensors of the host."""
    if dist_backend in ("nccl", "xccl"):
        dist_backend = None  # what follows from the device: that backend, and Gloo
    comm.init_distributed(dist_backend, *args, **kwargs)
    _tell_accelerate()


def is_initialized() -> bool:
    """Whether torch.distributed has been started."""
    started = dist.is_initialized()
    if started:
        _tell_accelerate()
    return started


def _tell_accelerate() -> None:
    """accelerate has no backend for ranks on the CPU that use DeepSpeed, and each would take itself for the only one. It asks
    the functions above while it makes its state, and reads the backend from there afterwards."""
    module = sys.modules.get("accelerate.state")
    state: dict[str, Any] = getattr(getattr(module, "PartialState", None), "_shared_state", {})
    being_made = "_cpu" in state and "num_processes" not in state
    if being_made and state.get("backend") is None:
        state["backend"] = dist.get_backend()
