"""`zero.Init`: models that are sharded while they are built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from zeroengine.comm import Fabric, init_distributed
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError, ModelError
from zeroengine.zero.held import HeldGroup
from zeroengine.zero.residency import slot_of

_PLACES = (None, "none", "cpu")


class Init(contextlib.AbstractContextManager["Init"]):
    """Models built inside the block hold one slice of every parameter on each rank, as soon as its module is built.

    Constructors and initialisers run as they do outside, on the host and with whole tensors, one module at a time: the values
    are those of rank 0's ordinary construction, whatever the other ranks' seeds. The peak memory of a rank is its share and the
    largest module's own parameters (of two modules, where one fills a tensor before it makes it a parameter). Buffers are not
    touched. Until `zeroengine.initialize` takes the model over, a parameter that is used (a second initialiser,
    `load_state_dict`, a resized embedding, a forward) is gathered for the time; every rank must therefore do the same with
    the model. `copy.deepcopy` gives another sharded model.

    `module`: an existing model to shard. `dtype`: floating-point parameters are cast to it when they are sharded; without it
    they keep their type, and the engine gets masters of full precision. `timeout`, `stall_timeout`: see the config's
    `health`. `config_dict_or_path` and `config` are accepted for compatibility and have no part in the construction:
    `zeroengine.initialize` reads them; so are `mem_efficient_linear` and `pin_memory`. Nested blocks are one block; an
    instance may be entered again. Starts torch.distributed if it is not (`init_distributed`).

    Raises `ConfigError` for a `remote_device` other than the host, a process group or an `mpu`, `ModelError` for a `module`
    without values.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True,
        remote_device: str | None = None, pin_memory: bool = False, config_dict_or_path: Any = None, config: Any = None,
        enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None, *, timeout: float = 10.0,
        stall_timeout: float = 600.0,
    ) -> None:  # fmt: skip
        del mem_efficient_linear, pin_memory, config_dict_or_path, config
        if data_parallel_group is not None or mpu is not None:
            raise ConfigError(
                "zero.Init cuts parameters over all ranks of the job; leave data_parallel_group and mpu out, and give the "
                "degrees of parallelism in the config's `mesh` section"
            )
        if remote_device not in _PLACES:
            raise ConfigError(f"zero.Init: remote_device is {remote_device!r}, but shards are kept on the host; leave it out")
        self._enabled = enabled
        self._group = HeldGroup(_Connection(timeout, stall_timeout), dtype)
        self._depth = 0
        self._building: nn.Module | None = None  # whose parameters are registered now
        self._hooks: list[RemovableHandle] = []
        if module is not None and enabled:
            self._shard(module)

    def __enter__(self) -> Init:
        if self._enabled and self._depth == 0:
            init_distributed()
            self._hooks.append(torch_module.register_module_parameter_registration_hook(self._registered))
        self._depth += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        self._depth -= 1
        if self._depth or not self._enabled:
            return
        while self._hooks:
            self._hooks.pop().remove()
        self._building = None
        if exc[0] is None:  # ranks that failed in other places must not meet in a collective
            self._group.flush()

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or not _can_be_held(param):
            return
        if self._building is not module:
            # Constructors go from module to module: the one before is built, or else its parameters come back when used.
            # Not earlier: what is replaced at once (a head that is tied to an embedding) is never cut, and the new
            # module's memory is not filled yet.
            self._building = module
            self._group.flush()
        self._group.add(param, f"{type(module).__name__}.{name}")

    def _shard(self, module: nn.Module) -> None:
        init_distributed()
        for name, param in module.named_parameters():
            if param.is_meta:
                raise ModelError(
                    f"parameter '{name}' is on the meta device and has no values; give it some with "
                    "zeroengine.zero.materialize(model, values), or build the model inside zero.Init()"
                )
            if _can_be_held(param):
                self._group.add(param, name)
                self._group.flush()


class _Connection:
    """Connects all ranks of the job, for as long as a group has parameters."""

    def __init__(self, timeout: float, stall_timeout: float) -> None:
        self._timeout = timeout
        self._stall_timeout = stall_timeout

    def __call__(self) -> tuple[Communicator, Callable[[], None]]:
        fabric = Fabric("cpu", timeout=self._timeout, stall_timeout=self._stall_timeout)
        return fabric.communicator("construction", control=True), fabric.close


def _can_be_held(param: nn.Parameter) -> bool:
    """Whether it has values of its own that can be cut. Wrappers (DTensor) have their own way, and lazy ones no shape yet."""
    plain = type(param).__torch_function__ is torch._C._disabled_torch_function_impl
    lazy = isinstance(param, UninitializedParameter)
    return plain and not lazy and not param.is_meta and param.numel() > 0 and slot_of(param) is None
