"""The device a rank computes on. The CPU is a real device; accelerators are reached through `torch.accelerator`."""

from __future__ import annotations

import os

import torch


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
