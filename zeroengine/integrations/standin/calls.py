"""`deepspeed.initialize` and `deepspeed.DeepSpeedConfig` with the arguments that scripts give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeroengine.comm import get_world_size, init_distributed, is_initialized
from zeroengine.config import BatchSizes, Config, resolve_batch
from zeroengine.config.source import read
from zeroengine.device import DTYPES
from zeroengine.engine import initialize as build
from zeroengine.engine.engine import ZeroEngine
from zeroengine.engine.initialize import ConfigSource
from zeroengine.errors import ConfigError
from zeroengine.integrations.standin.sequences import SequenceParallelism, batch_of_accelerate
from zeroengine.logging import log_once

_TP_SIZE = "_zero_tp_size"
_WITHOUT_EFFECT = ("mesh_param", "mesh_device", "dont_change_device")


class _NoParameters:
    """`parameter_offload.module`: nothing of the model is bound to the handles."""

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


class ParameterOffload:
    """What trl takes off and puts on again around generation with gathered weights: hooks which would gather and release in every
    layer. Hooks here leave gathered parameters alone, so there is nothing to take off."""

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing was taken off."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
    **others: Any,
) -> tuple[ZeroEngine, Any, Any, Any]:
    """`zeroengine.initialize`, in DeepSpeed's order of arguments. Returns (engine, optimizer, data loader, scheduler)."""
    unknown = sorted(set(others) - set(_WITHOUT_EFFECT))
    if unknown:
        raise TypeError(f"deepspeed.initialize() got an unexpected keyword argument {unknown[0]!r}")
    if mesh_param is not None:
        raise ConfigError("deepspeed.initialize: mesh_param is not read; give the degrees in the configuration's `mesh` section")
    if dist_init_required is False and not is_initialized():
        raise ConfigError("deepspeed.initialize: dist_init_required is false, and torch.distributed is not initialised; leave it out")
    scale_config = getattr(args, "deepscale_config", None)
    if config is None and config_params is None and getattr(args, "deepspeed_config", None) is None:
        config = scale_config
    if isinstance(mpu, SequenceParallelism):
        given = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None), {})
        config, mpu = mpu.configured(given.to_dict() if isinstance(given, Config) else read(given).values), None
    else:
        config = _nested(config) if isinstance(config, Mapping) else config
        if isinstance(config_params, Mapping):
            config_params = batch_of_accelerate(config_params, get_world_size() if is_initialized() else 1)
    asked = getattr(model, _TP_SIZE, 1)
    engine, wrapped, loader, scheduler = build.initialize(
        args=args, model=model, optimizer=optimizer, model_parameters=model_parameters, training_data=training_data,
        lr_scheduler=lr_scheduler, distributed_port=distributed_port, mpu=mpu, collate_fn=collate_fn, config=config,
        config_params=config_params,
    )  # fmt: skip
    if asked != engine.mesh.degrees.tp:
        engine.destroy()
        raise _other_degree(asked, engine.mesh.degrees.tp)
    if wrapped is not None and engine.zero_optimization_partition_weights():
        wrapped.parameter_offload = ParameterOffload()  # type: ignore[attr-defined]
    return engine, wrapped, loader, scheduler


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config` with what is spelled `section.key` at its top (trl writes the sizes of a reference model so) in that section, unless
    the section says something else than "auto". Sizes are whole numbers."""
    spelled = {k: v for k, v in config.items() if k.count(".") == 1 and isinstance(config.get(k.partition(".")[0]), Mapping)}
    if not spelled:
        return config
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in config.items() if k not in spelled}
    for path, value in spelled.items():
        section, _, key = path.partition(".")
        if found[section].get(key, "auto") == "auto":
            found[section][key] = int(value) if isinstance(value, float) and value > 1 else value
    return found


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: ConfigSource | None = None) -> nn.Module:
    """`model` as it is: `initialize` splits it over `tp_size` ranks, as the configuration says as well. Raises `ConfigError` where
    that says another number, here if `config` is given, or else in `initialize`."""
    said = config["tensor_parallel"].get("autotp_size", 1) if isinstance(config, Mapping) and "tensor_parallel" in config else tp_size
    if said != tp_size:
        raise _other_degree(tp_size, said)
    setattr(model, _TP_SIZE, tp_size)
    return model


def _other_degree(asked: int, said: int) -> ConfigError:
    return ConfigError(
        f"deepspeed.tp_model_init was asked for {asked} tensor-parallel ranks, and the configuration says {said}; write "
        f"`tensor_parallel.autotp_size`: {asked} (or `mesh.tp`), which is what splits the layers"
    )


class DeepSpeedConfig:
    """A configuration that a script reads before it makes an engine. Attributes have DeepSpeed's names; batch sizes are
    those of the ranks there are."""

    def __init__(self, config: ConfigSource, mpu: Any = None, mesh_device: Any = None) -> None:
        if mpu is not None or mesh_device is not None:
            log_once("DeepSpeedConfig: mpu and mesh_device are not read; degrees are in the configuration's `mesh` section")
        init_distributed()
        self.settings = Config.load(config)
        self._batch: BatchSizes = resolve_batch(self.settings, self.settings.data_parallel_size(get_world_size()))
        self._param_dict = self.settings.to_dict(self._batch)

    @property
    def train_batch_size(self) -> int:
        return self._batch.train

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro

    @property
    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    @property
    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    @property
    def steps_per_print(self) -> float | None:
        return self.settings.steps_per_print

    @property
    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    @property
    def zero_enabled(self) -> bool:
        return self.zero_optimization_stage > 0

    @property
    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    @property
    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    @property
    def optimizer_name(self) -> str | None:
        return None if self.settings.optimizer is None else self.settings.optimizer.type.lower()

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        return None if self.settings.optimizer is None else dict(self.settings.optimizer.params)

    @property
    def communication_data_type(self) -> torch.dtype | None:
        chosen = self.settings.communication_data_type
        return None if chosen is None else DTYPES[chosen]
