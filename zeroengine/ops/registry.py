"""Which implementation an operation has on a device, and why."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zeroengine.ops.build import Library, library


@dataclass(frozen=True)
class Operation:
    """A name, what it does in one line, and the native library that has it for the CPU and for CUDA, if any. Every operation
    has a twin, in torch for every device (collectives: Gloo; aio: in Python; heap: malloc)."""

    name: str
    about: str
    cpu: str | None
    cuda: str | None


OPERATIONS: Mapping[str, Operation] = {
    op.name: op
    for op in (
        Operation("update", "optimizer step: scale, update, rounded copy in one pass", "update", "update_cuda"),
        Operation("cast", "scale and convert between fp32, bf16 and fp16", "update", "update_cuda"),
        Operation("squares", "sum of squares and count of non-finite elements in one read", "update", None),
        Operation("collectives", "collectives and messages between processes of one host, for CPU tensors", "shm", None),
        Operation("aio", "reads and writes of files beside the computation, with checksums", "aio", None),
        Operation("heap", "memory of large CPU tensors, without holes and kept between steps", "heap", None),
    )
}


@dataclass(frozen=True)
class Choice:
    """What runs `operation` on `device`: `implementation` is "native" or "twin", `reason` says why in one line."""

    operation: str
    device: torch.device
    implementation: str
    reason: str
    dll: ctypes.CDLL | None = None


def choose(operation: str, device: torch.device) -> Choice:
    """The implementation of `operation` on `device`; builds the native one on first use.

    Raises KeyError for an unknown operation, ZeroEngineError with ZE_OPS=native where the native one is missing.
    """
    op = OPERATIONS[operation]
    if device.type == "cpu":
        name = op.cpu
    elif device.type == "cuda" and torch.version.cuda is not None:
        name = op.cuda
    else:
        name = None
    if name is None:
        return Choice(operation, device, "twin", f"there is no native one for {device.type}")
    found = _library(name, device)
    return Choice(operation, device, "native" if found else "twin", found.reason, found.dll)


def _library(name: str, device: torch.device) -> Library:
    if device.type == "cpu":
        return library(name)
    major, minor = torch.cuda.get_device_capability(device)
    return library(name, arch=f"sm_{major}{minor}")
