"""The device a rank computes on, and the types it computes in. The CPU is a real device; accelerators are reached through
`torch.accelerator`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
"""Types of weights and gradients by the names that configurations and commands have for them."""


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
