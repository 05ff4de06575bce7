"""What training scripts ask an engine, beyond its own facts: names and meanings of DeepSpeed's engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.comm import get_local_rank
from zeroengine.config import BatchSizes, Config
from zeroengine.engine.data import EngineLoader
from zeroengine.engine.mechanism import Mechanism
from zeroengine.errors import ConfigError
from zeroengine.logging import log_once
from zeroengine.mesh import Mesh
from zeroengine.zero.policy import policy_for


class ScriptMethods:
    """Methods of `ZeroEngine` that scripts expect of an engine."""

    module: nn.Module
    settings: Config
    batch: BatchSizes
    mesh: Mesh
    mechanism: Mechanism
    lr_scheduler: Any
    training_dataloader: EngineLoader | None
    micro_steps: int

    if TYPE_CHECKING:

        def _prepare_backward(self) -> None: ...

        def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any: ...

    # --- the configuration ----------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return policy_for(self.settings.zero_optimization.stage).shard_state

    def zero_optimization_partition_gradients(self) -> bool:
        return policy_for(self.settings.zero_optimization.stage).shard_grads

    def zero_optimization_partition_weights(self) -> bool:
        return policy_for(self.settings.zero_optimization.stage).shard_params

    def train_batch_size(self) -> int:
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.batch.accumulation

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def steps_per_print(self) -> float | None:
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.settings.wall_clock_breakdown

    def dynamic_loss_scale(self) -> bool:
        return self.settings.fp16.enabled and self.settings.fp16.loss_scale == 0

    def optimizer_name(self) -> str | None:
        """Class of the torch optimizer that updates, None without one."""
        optimizer = self.mechanism.optimizer
        return None if optimizer is None else type(optimizer.optimizer).__name__

    def scheduler_name(self) -> str | None:
        return None if self.lr_scheduler is None else type(self.lr_scheduler).__name__

    # --- ranks ----------------------------------------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        return get_local_rank()

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.fabric.world_size

    @property
    def dp_world_size(self) -> int:
        return self.mesh.data_parallel_size

    @property
    def data_parallel_group(self) -> Any:
        """torch's group of the ranks that read different data, for a script's own collectives."""
        if self.mesh.sample_groups != self.world_size:
            raise ConfigError(
                f"data_parallel_group: the {self.world_size} ranks are not one data-parallel group here; make the group that you "
                "need from engine.mesh.ranks_along(...)"
            )
        return dist.group.WORLD

    # --- changes while training -----------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples of a step by the number of micro-batches. Between steps, and on all ranks alike. Raises
        `ConfigError` if they do not divide."""
        per_micro = self.batch.micro * self.mesh.sample_groups
        if train_batch_size < 1 or train_batch_size % per_micro:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): a step is a multiple of {self.batch.micro} samples x "
                f"{self.mesh.sample_groups} data-parallel ranks = {per_micro}"
            )
        self._set_batch(train_batch_size, self.batch.micro)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples of a micro-batch, and with them those of a step. Between steps, and on all ranks alike. Not where the
        engine's own loader gives the micro-batches."""
        if micro_batch_size < 1:
            raise ConfigError(f"set_train_micro_batch_size({micro_batch_size}): at least 1")
        if self.training_dataloader is not None and micro_batch_size != self.batch.micro:
            raise ConfigError(
                f"set_train_micro_batch_size({micro_batch_size}): the engine's own loader of training_data gives {self.batch.micro} "
                "samples at a time; give zeroengine.initialize no training_data and batches of your own loader to the engine, or change "
                "the number of micro-batches by set_train_batch_size"
            )
        self._set_batch(micro_batch_size * self.batch.accumulation * self.mesh.sample_groups, micro_batch_size)

    def _set_batch(self, train: int, micro: int) -> None:
        if self.mechanism.reducer.unfinished:
            raise ConfigError("the batch size changes between steps; there are gradients of a step under way")
        accumulation = train // (micro * self.mesh.sample_groups)
        self.batch = dataclasses.replace(self.batch, train=train, micro=micro, accumulation=accumulation)
        self.micro_steps = 0  # the next micro-batch is the first of a step
        self._prepare_backward()

    def set_lr(self, lr: float) -> None:
        """Gives every parameter group this rate; a schedule replaces it at its next step."""
        if self.mechanism.optimizer is not None:
            for group in self.mechanism.optimizer.param_groups:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each parameter group."""
        optimizer = self.mechanism.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_batch_info(self) -> tuple[int, int, int]:
        """(samples a step, samples a micro-batch and rank, micro-batches a step)."""
        return self.batch.train, self.batch.micro, self.batch.accumulation

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Nothing: gradients are reduced while backward runs."""
        log_once("engine.allreduce_gradients has no effect: gradients are reduced while backward runs")

    # --- compilation ----------------------------------------------------------------------------------------------

    def compile(
        self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:  # fmt: skip
        """Compiles the module's forward with torch.compile, in place. Refused at stage 3, and with a schedule of graph passes."""
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError("engine.compile takes a backend and compile_kwargs; it has no schedule and no compiled autograd")
        if self.zero_optimization_partition_weights():
            raise ConfigError(
                "engine.compile at stage 3 would gather the whole model at once; compile its blocks, before or after "
                "zeroengine.initialize: `for block in model.layers: block.compile()`, or use stage 2"
            )
        options = dict(compile_kwargs or {})
        self.module.compile(backend=options.pop("backend", backend), **options)

    @property
    def is_compiled(self) -> bool:
        return self.module._compiled_call_impl is not None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
