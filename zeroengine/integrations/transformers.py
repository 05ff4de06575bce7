"""transformers' Trainer on a zeroengine, without the `deepspeed` stand-in.

    trainer = ZeroTrainer(model, args, train_dataset=data, config="zero3.json")
    trainer.train()

Launch with `zerorun`. On the CPU `TrainingArguments` needs `use_cpu=True`, or accelerate takes every rank for the only one.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from zeroengine.comm import get_world_size, is_initialized
from zeroengine.config import Config
from zeroengine.engine import initialize as build
from zeroengine.engine.engine import ZeroEngine
from zeroengine.errors import CheckpointError, ConfigError
from zeroengine.integrations.batches import in_turn

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


class EngineOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as the Trainer's loop sees it. The engine has stepped by the time that the loop calls `step`, as
    the norm which the loop logs before it is that of the step."""

    def __init__(self, engine: ZeroEngine) -> None:
        if engine.optimizer is None:
            raise ConfigError("an engine without an optimizer cannot train")
        # torch's own __init__ would build groups over parameters; the engine's optimizer has them.
        self.inner = engine.optimizer
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @property
    def step_was_skipped(self) -> bool:
        """accelerate's name for a step without an update."""
        return self.inner.overflow

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the engine steps at the end of an accumulation."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine's step ends with it."""

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class EngineScheduler:
    """The configuration's own schedule as the Trainer's loop sees it: the engine moves it on."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def step(self, *_: Any) -> None:
        """Nothing: the engine's step does it."""

    def get_last_lr(self) -> list[float]:
        rates: list[float] = self.schedule.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state)


class ZeroTrainer(Trainer):
    """A `Trainer` with its arguments and `config`: a path or dict with the keys of docs/config.md.

    What the configuration leaves open or says is "auto" comes from the `TrainingArguments`: the batch, the clipping, the rates,
    the type of the weights. Without an `optimizer` section the Trainer makes the optimizer, and without a `scheduler` section the
    schedule. Raises `ConfigError` where the two say different things, and where accelerate does not see the ranks.

    With `mesh.cp` ranks share sequences: those that do train on the batches of each of them in turn, and in evaluation each
    rank has batches of its own.
    """

    lr_scheduler: Any
    model_wrapped: Any
    _cp = 1  # ranks that share a sequence
    _shares_batches = False  # the batches whose tokens are counted now are those of all of them

    def __init__(self, *args: Any, config: ConfigSource, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError("ZeroTrainer shards by itself; remove deepspeed and fsdp from the TrainingArguments")
        world = get_world_size() if is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if self.args.world_size != world:
            raise ConfigError(
                f"the job has {world} ranks, and accelerate counts {self.args.world_size}: on the CPU give TrainingArguments use_cpu=True, "
                "elsewhere start the program with zerorun"
            )
        self.engine: ZeroEngine | None = None
        self._source = config
        self._cp = self._degree_of_sequences()

    # --- building -------------------------------------------------------------------------------------------------

    def _degree_of_sequences(self) -> int:
        """`mesh.cp`. Refuses degrees for which the Trainer's loaders would have to give ranks the same batches all the time."""
        mesh = Config.load(self._source, facts=self._facts(1)).mesh
        if mesh.tp > 1 or mesh.pp > 1:
            raise ConfigError(
                f"ZeroTrainer: mesh.tp is {mesh.tp} and mesh.pp {mesh.pp}; the Trainer gives every rank samples of its own. Split "
                "layers with TrainingArguments(deepspeed=...) and `tensor_parallel.autotp_size`, and pipelines with zeroengine.initialize"
            )
        if self.args.world_size % mesh.cp:
            raise ConfigError(
                f"mesh.cp is {mesh.cp}, which does not divide the {self.args.world_size} ranks of the job; change one of them"
            )
        return mesh.cp

    def get_sp_size(self) -> int:
        """The Trainer's name for the number of ranks that share a sequence."""
        return self._cp

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of a step."""
        self._shares_batches = True
        try:
            return super().get_batch_samples(*args, **kwargs)
        finally:
            self._shares_batches = False

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """The tokens of all ranks' batches: in evaluation no two ranks have the same ones."""
        found: Tensor | int | None = super()._get_num_items_in_batch(batch_samples, device)
        return found if found is None or self._shares_batches else found * self._cp

    def _facts(self, max_steps: int) -> dict[str, Any]:
        """The arguments' answers to what a configuration leaves open."""
        a = self.args
        return {
            "dtype": "bf16" if a.bf16 else "fp16" if a.fp16 else "fp32",
            "train_micro_batch_size_per_gpu": self._train_batch_size,
            "gradient_accumulation_steps": a.gradient_accumulation_steps,
            "train_batch_size": self._train_batch_size * a.gradient_accumulation_steps * a.world_size // self._cp,
            "max_grad_norm": a.max_grad_norm,
            "lr": a.learning_rate,
            "betas": [a.adam_beta1, a.adam_beta2],
            "eps": a.adam_epsilon,
            "weight_decay": a.weight_decay,
            "warmup_num_steps": max(1, a.get_warmup_steps(max_steps)),
            "total_num_steps": max_steps,
        }

    def _config(self, max_steps: int) -> Config:
        """The configuration with the arguments' answers."""
        a, facts = self.args, self._facts(max_steps)
        written = Config.load(self._source, facts=facts).to_dict()
        asked = {
            "train_micro_batch_size_per_gpu": facts["train_micro_batch_size_per_gpu"],
            "gradient_accumulation_steps": facts["gradient_accumulation_steps"],
            "train_batch_size": facts["train_batch_size"],
            "gradient_clipping": a.max_grad_norm,
        }
        for name, value in asked.items():
            if written.setdefault(name, value) != value:
                raise ConfigError(f"`{name}` is {written[name]} in the configuration and {value} by the TrainingArguments; make them agree")
        for name, on in (("bf16", a.bf16), ("fp16", a.fp16)):
            section = written.setdefault(name, {"enabled": on})
            if bool(section.get("enabled", False)) != on:
                raise ConfigError(
                    f"`{name}.enabled` is {not on} in the configuration and {name}={on} in the TrainingArguments; make them agree"
                )
        if self._cp > 1:
            written.setdefault("sequence_parallel", {})["disable_in_eval"] = True
        return Config.load(written)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> tuple[nn.Module, Any]:
        if self.engine is not None:  # train() again: from the weights there are, as the Trainer does
            self._let_go()
        config = self._config(max_steps)
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        own = None if config.optimizer is not None else self.create_optimizer()
        engine, _, _, schedule = build.initialize(model=self.model, optimizer=own, config=config)
        self.engine = self.model_wrapped = engine
        self.optimizer = EngineOptimizer(engine)
        self.accelerator._models.append(engine)
        self.accelerator._optimizers.append(self.optimizer)
        self.accelerator.backward = self._backward
        if schedule is not None:
            self.lr_scheduler = EngineScheduler(schedule)
        else:
            self.create_scheduler(num_training_steps=max_steps, optimizer=self.optimizer)
        if resume_from_checkpoint is not None:
            self._load_engine(resume_from_checkpoint)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        if self._cp > 1:
            group = dist.new_subgroups(self._cp)[0]
            train_dataloader = in_turn(train_dataloader, group, self.args.device)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return engine, train_dataloader

    def _let_go(self) -> None:
        """Takes the engine off the model. Collective."""
        if self.engine is not None:
            self.accelerator._models.remove(self.engine)
            self.accelerator._optimizers.remove(self.optimizer)
            self.engine.destroy()
            self.engine, self.model_wrapped, self.optimizer = None, self.model, None

    # --- the step -------------------------------------------------------------------------------------------------

    def _backward(self, loss: Tensor, **_: Any) -> None:
        """In the place of `accelerator.backward`. The Trainer has divided the loss already."""
        engine = self._need_engine()
        engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        engine.backward(loss, scale_wrt_gas=False)
        if self.accelerator.sync_gradients:
            engine.step()

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        return self._need_engine().get_global_grad_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._need_engine().get_global_grad_norm()

    def _need_engine(self) -> ZeroEngine:
        if self.engine is None:
            raise ConfigError("ZeroTrainer has no engine before train()")
        return self.engine

    # --- saving and loading ---------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, with the whole weights. Collective."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        state = self.engine.full_state_dict(exclude_frozen_parameters=self._is_adapter())
        if self.args.should_save:
            self._save(folder, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._need_engine().save_checkpoint(output_dir, exclude_frozen_parameters=self._is_adapter())
        if self.args.should_save and not isinstance(self.lr_scheduler, EngineScheduler):
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The schedule that the Trainer owns; all else is the engine's."""
        if checkpoint is not None and not isinstance(self.lr_scheduler, EngineScheduler):
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the engine loads its checkpoint when it is made."""

    def _load_best_model(self) -> None:
        self._load_engine(self.state.best_model_checkpoint)

    def _load_engine(self, folder: str | None) -> None:
        if folder is None:
            raise CheckpointError("no best model was saved; give TrainingArguments save and evaluation steps that meet")
        if not glob.glob(str(Path(folder) / "global_step*")):
            raise CheckpointError(f"{folder} has no checkpoint of an engine (global_step*); it was saved by another Trainer")
        self._need_engine().load_checkpoint(folder, load_module_strict=not self._is_adapter())

    def _is_adapter(self) -> bool:
        return hasattr(self.model, "peft_config") and hasattr(self.model, "get_base_model")
