"""Small helpers of `deepspeed.utils` and `deepspeed.runtime.utils`."""

from __future__ import annotations

import contextlib
import enum
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.device import local_device
from zeroengine.logging import log_rank0, logger


class ZeroStageEnum(enum.IntEnum):
    """Stages by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):
    """Places for `engine.offload_states(device=...)`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Kinds for `engine.offload_states(include=...)`."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the ranks given; on all with None or [-1]."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs what the process holds, with `force`."""
    if not force:
        return
    import psutil

    resident = psutil.Process().memory_info().rss
    device = local_device()
    held = "" if device.type == "cpu" else f", device {torch.accelerator.memory_allocated(device) / 2**30:.2f} GiB"
    log_rank0(f"{message}: resident {resident / 2**30:.2f} GiB{held}")


def set_random_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested dicts, lists and tuples whose tensors own memory of just their size: a view into a bucket would be
    saved with the whole bucket. Tensors that share a parameter go on sharing."""
    return _cloned(item, torch.device(device), {})


def _cloned(item: Any, device: torch.device, seen: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(item, Tensor):
        key = (item.data_ptr(), item.shape, item.stride(), item.dtype)
        if key not in seen or not item.numel():
            seen[key] = item.detach().clone().to(device)
        return seen[key]
    if isinstance(item, (list, tuple)):
        return type(item)(_cloned(value, device, seen) for value in item)
    if isinstance(item, dict):
        return type(item)((name, _cloned(value, device, seen)) for name, value in item.items())
    return item


class RepeatingLoader:
    """Starts a loader again when it is at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice(contextlib.AbstractContextManager[None]):
    """Parameters and tensors made inside have `dtype`, and lie on `device` ("meta": they have no values)."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._stack.callback(torch.set_default_dtype, before)
            self._stack.enter_context(torch.device(self._device))

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing: a parameter that is used outside its own module is gathered by its use."""


def unwrapped(fn: Any, *_: Any, **__: Any) -> Any:
    """`fn` itself, from what in DeepSpeed wraps functions."""
    return fn


def yes() -> bool:
    """The answer to questions about what torch can do."""
    return True
