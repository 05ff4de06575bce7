"""`init_distributed`: DeepSpeed's name and meaning for starting torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.comm.rendezvous import meet, place_from_environment
from zeroengine.errors import ConfigError
from zeroengine.logging import log_rank0

_DEFAULT_TIMEOUT = timedelta(minutes=30)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | float = _DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialises torch.distributed once; a second call does nothing.

    The backend follows the device (Gloo on CPU; NCCL for CUDA tensors with Gloo beside it for CPU tensors) unless `dist_backend`
    names one, as "zeroengine" (see `comm.torch_backend`) or "cpu:zeroengine,cuda:nccl". Rank, world size and meeting point
    come from torchrun's environment variables, from an MPI launcher's with `auto_mpi_discovery`, or from the arguments; a
    process without any becomes a world of one and needs no port. `timeout` is a timedelta or seconds. `config` is accepted
    for compatibility and has no part in this.

    Raises `ConfigError` for missing or contradictory variables and `RankError`, within seconds and on every rank, when
    the port is not ours.
    """
    del config
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError("dist_init_required=False, but torch.distributed is not initialised; initialise it first")
    if "zeroengine" in _backend_names(dist_backend):
        import zeroengine.comm.torch_backend  # noqa: F401  # registers it; a plugin that nobody asked for would change torch's defaults
    wait = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    backend = dist_backend or _default_backend()
    if init_method is not None and init_method != "env://":
        dist.init_process_group(backend, init_method=init_method, timeout=wait, rank=rank, world_size=world_size)
    else:
        _from_environment(backend, wait, distributed_port, auto_mpi_discovery, rank, world_size)
    if verbose:
        log_rank0(f"torch.distributed: backend {dist.get_backend()}, {dist.get_world_size()} ranks")


def _from_environment(backend: str, timeout: timedelta, port: int, mpi: bool, rank: int, world_size: int) -> None:
    env = dict(os.environ)
    if env.get("MASTER_ADDR"):
        env.setdefault("MASTER_PORT", str(port))
    place = place_from_environment(env, rank, world_size, mpi)
    if place is None:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    dist.init_process_group(backend, store=meet(place, timeout), rank=place.rank, world_size=place.world_size, timeout=timeout)


def _default_backend() -> str:
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        if device is not None and device.type != "cpu":
            return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    return "gloo"


def _backend_names(text: str | None) -> list[str]:
    """Of "gloo" or "cpu:gloo,cuda:nccl"."""
    return [part.rpartition(":")[2] for part in (text or "").lower().split(",")]


def get_local_rank() -> int:
    """LOCAL_RANK of the launcher, 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))
