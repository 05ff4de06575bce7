"""`deepspeed.accelerator.get_accelerator()`: the device of this process under DeepSpeed's names, over torch.accelerator."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from zeroengine.device import local_device


class Accelerator:
    """The kind of device that this process computes on. Attributes that are not here are those of `torch.cuda`, `torch.xpu`, ...;
    the CPU has none of them."""

    def __init__(self) -> None:
        self._name = local_device().type

    @property
    def _module(self) -> ModuleType:
        return torch.cpu if self._name == "cpu" else torch.get_device_module(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._module, name)

    def device_name(self, device_index: int | str | None = None) -> str:
        """ "cuda", or "cuda:1" with an index; the CPU has one name."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index)) if self._name == "cpu" else self._module.device(device_index)

    def current_device(self) -> int | str:
        return "cpu" if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int | str | torch.device) -> None:
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        return 1 if self._name == "cpu" else torch.accelerator.device_count()

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            torch.accelerator.synchronize(*(() if device_index is None else (device_index,)))

    def communication_backend_name(self) -> str:
        return "gloo" if self._name == "cpu" else torch.distributed.get_default_backend_for_device(self._name)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._name == "cpu":
            return torch.get_rng_state()
        return self._module.get_rng_state(*(() if device_index is None else (device_index,)))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *(() if device_index is None else (device_index,)))

    def is_bf16_supported(self) -> bool:
        return True if self._name == "cpu" else bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def memory_allocated(self, device_index: int | None = None) -> int:
        return _host_bytes() if self._name == "cpu" else torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return _host_bytes() if self._name == "cpu" else torch.accelerator.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            torch.accelerator.reset_peak_memory_stats(device_index)

    def empty_cache(self) -> None:
        if self._name != "cpu":
            torch.accelerator.empty_cache()

    def total_memory(self, device_index: int | None = None) -> int:
        if self._name == "cpu":
            import psutil

            return int(psutil.virtual_memory().total)
        return int(self._module.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._name == "cpu":
            import psutil

            return int(psutil.virtual_memory().available)
        return int(self._module.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def range_push(self, message: str) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()


@functools.cache
def get_accelerator() -> Accelerator:
    """The one accelerator of this process."""
    return Accelerator()


def _host_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
