"""The device a rank computes on, and the types it computes in. The CPU is a real device; accelerators are reached through
`torch.accelerator`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
"""Types of weights and gradients by the names that configurations and commands have for them."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def local_device() -> torch.device:
    """This rank's device: the accelerator numbered LOCAL_RANK where there is one, else the CPU.

    `ZE_ACCELERATOR=cpu` keeps to the CPU on a machine with accelerators.
    """
    if os.environ.get("ZE_ACCELERATOR", "").lower() == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % max(torch.accelerator.device_count(), 1)
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def keep_freed_memory(device: torch.device) -> None:
    """Lets this process keep what the steps free, where they compute in host memory.

    glibc's malloc returns large blocks to the system as soon as they are free, and takes them again with a page fault for every
    4 KiB: activations and gradients of each step. The peak stays what it is. Other allocators, and thresholds that the environment
    gives (mallopt(3)), are left alone.
    """
    told = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"} & os.environ.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" and os.name == "posix" and not told else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes everywhere
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
