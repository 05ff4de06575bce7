"""One implementation of an AdamW step as a job of `benchmarks.worker`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.errors import Unavailable

_BYTES = {"copy": 8}
_ADAM_BYTES = 28


def _optimizer(system: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if system.startswith("zeroengine"):
        from zeroengine.ops import CPUAdam

        return CPUAdam(params, weight_decay=0.01)
    if system == "deepspeed":
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
        except ImportError as error:
            raise Unavailable(f"deepspeed cannot be imported: {error}") from error
        try:
            return DeepSpeedCPUAdam(params, weight_decay=0.01)
        except Exception as error:
            raise Unavailable(f"DeepSpeedCPUAdam cannot be built: {error}") from error
    return torch.optim.AdamW(params, weight_decay=0.01, fused=system == "torch fused", foreach=system == "torch foreach")


class AdamJob:
    """Parameters of `elements` in all, in `tensors` tensors, with gradients that stay; a turn is some steps."""

    def __init__(self, system: str, elements: int, tensors: int) -> None:
        if system == "zeroengine twin":
            os.environ["ZE_OPS"] = "twin"
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.manual_seed(0)
        size = max(1, elements // tensors)
        self._bytes = size * tensors * _BYTES.get(system, _ADAM_BYTES)
        self._facts: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        params = [torch.nn.Parameter(torch.randn(size)) for _ in range(tensors)]
        for p in params:
            p.grad = torch.randn(size) * 0.01
        if system == "copy":
            self._step: Callable[[], Any] = lambda: self._copy(params)
            return
        self._step = _optimizer(system, params).step
        if system.startswith("zeroengine"):
            from zeroengine.ops import choose

            choice = choose("update", torch.device("cpu"))
            self._facts["implementation"] = f"{choice.implementation}: {choice.reason}"

    @staticmethod
    def _copy(params: list[torch.nn.Parameter]) -> None:
        with torch.no_grad():
            for p in params:
                if p.grad is not None:
                    p.copy_(p.grad)

    def ready(self) -> dict[str, Any]:
        return self._facts

    def turn(self, steps: int) -> dict[str, Any]:
        """{seconds, bytes} of `steps` steps."""
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        return {"seconds": time.perf_counter() - began, "bytes": self._bytes * steps}


def job(**arguments: Any) -> AdamJob:
    return AdamJob(**arguments)
