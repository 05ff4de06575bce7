"""`ZeroEngine`: a model with its mechanism, and the training step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroengine.config import BatchSizes, Config
from zeroengine.engine import report
from zeroengine.engine.checkpointing import CheckpointMethods
from zeroengine.engine.data import EngineLoader
from zeroengine.engine.experts import ExpertParallel
from zeroengine.engine.mechanism import Mechanism, compute_dtype
from zeroengine.engine.names import ScriptMethods
from zeroengine.engine.parallel import check_replicas
from zeroengine.engine.parking import OffloadMethods
from zeroengine.engine.phases import PhaseTimes
from zeroengine.engine.state import WeightMethods
from zeroengine.errors import ConfigError
from zeroengine.logging import log_once, log_rank0, logger
from zeroengine.mesh import Mesh
from zeroengine.moe.statistics import LayerStatistics
from zeroengine.optim.optimizer import StepResult, ZeroOptimizer
from zeroengine.parallel.hf import SharedSequences
from zeroengine.parallel.same import check_same_batch
from zeroengine.parallel.stages import StageSequences
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.zero.hooks import ModuleHook
from zeroengine.zero.sharder import in_backward


class ZeroEngine(CheckpointMethods, WeightMethods, OffloadMethods, ScriptMethods, nn.Module):
    """Trains `module` under the configuration. Made by `zeroengine.initialize`.

        for batch in loader:
            loss = engine(**batch)
            engine.backward(loss)      # or loss.backward()
            engine.step()              # updates at the last micro-batch of a step

    Gradients are averaged over micro-batches and data-parallel ranks; both ways of calling backward divide by the number
    of accumulation steps. Attributes that the engine lacks are looked up on `module`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        batch: BatchSizes,
        mesh: Mesh,
        owns_mesh: bool,
        mechanism: Mechanism,
        lr_scheduler: Any,
        loader: EngineLoader | None,
        sequences: SharedSequences | StageSequences | None = None,
        layers: TensorParallel | None = None,
        experts: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.settings = config
        self.batch = batch
        self.mesh = mesh
        self.mechanism = mechanism
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = loader
        self.sequences = sequences
        self.layers = layers
        self.experts = experts
        self.device = mesh.fabric.device
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self._owns_mesh = owns_mesh
        self._boundary: bool | None = None  # set by the user, else counted
        self._syncs = True
        self._step_ended = False
        self._times = PhaseTimes(config.wall_clock_breakdown, self.device)
        self._last_loss: Tensor | None = None
        self._data: Iterator[Any] | None = None  # the engine's own loader, epoch after epoch
        self._destroyed = False
        self._begin_hook = module.register_forward_pre_hook(ModuleHook(self._begin), prepend=True)
        self._prepare_backward()

    # --- forward, backward, step ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. With 16-bit weights, fp32 tensors among the arguments are cast to their type."""
        dtype = compute_dtype(self.settings)
        if dtype is not None:

            def cast(x: Any) -> Any:
                return x.to(dtype) if isinstance(x, Tensor) and x.dtype is torch.float32 else x

            args, kwargs = tree_map(cast, args), tree_map(cast, kwargs)
        with self._times.phase("forward"):
            if isinstance(self.sequences, SharedSequences):
                return self.sequences.run(self.module, args, kwargs)
            check_same_batch((args, kwargs), self.mesh.same_sample)
            return self.module(*args, **kwargs)

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Before each forward of the whole model."""
        self.mechanism.placement.check_here()
        if torch.is_grad_enabled() and not in_backward() and self.optimizer is not None:
            self._begin_step()
            self.mechanism.sharder.end_backward()
            self.mechanism.reducer.next_micro_batch()
            self._prepare_backward()

    def _begin_step(self) -> None:
        """Before a forward: what was counted for the last step goes, once a new one begins."""
        if self._step_ended and self.experts is not None:
            self.experts.forget()
        self._step_ended = False

    def _prepare_backward(self) -> None:
        reducer = self.mechanism.reducer
        reducer.scale = 1.0 / self.batch.accumulation
        reducer.synchronize = self._syncs and self.is_gradient_accumulation_boundary()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Adds the gradients of `loss` (a scalar) / accumulation steps; `scale_wrt_gas=False` says that the loss has been
        divided already. Applies the loss scale of fp16. Reduces while it runs. Returns `loss`."""
        optimizer = self._need_optimizer("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"engine.backward takes a scalar loss, not {shape}; reduce it (mean or sum) first")
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on any trainable parameter (it requires no grad); it was computed under no_grad, "
                "detached, or by a model that is frozen"
            )
        self._prepare_backward()
        reducer, scale = self.mechanism.reducer, optimizer.scaler.scale
        self._last_loss = loss.detach()
        reducer.scale = (1.0 / self.batch.accumulation if scale_wrt_gas else 1.0) / scale
        reducer.mark_backward()
        reducer.guided = True
        try:
            with self._times.phase("backward"):
                (loss if scale == 1.0 else loss.float() * scale).backward(retain_graph=retain_graph)
        finally:
            reducer.guided = False
            reducer.scale = 1.0 / self.batch.accumulation
        self.mechanism.sharder.end_backward()
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the last one of a step clips, updates, and moves the schedule on."""
        optimizer = self._need_optimizer("step")
        if self.mechanism.reducer.plain and optimizer.scaler.scale != 1.0:
            log_once(
                f"loss.backward() was called under fp16: those gradients were not multiplied by the loss scale "
                f"({optimizer.scaler.scale:g}), and small ones are lost in fp16; call engine.backward(loss) instead"
            )
        if not self.is_gradient_accumulation_boundary():
            self.mechanism.reducer.next_micro_batch()
            self.micro_steps += 1
            self._prepare_backward()
            return
        with self._times.phase("step"):
            result = optimizer.step()
        self.micro_steps += 1
        self.global_steps += 1
        self.global_samples += self.batch.train
        self._step_ended = True
        if result.applied and self.experts is not None:
            self.experts.after_step()
        if result.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        if not result.applied and self._last_loss is not None and not bool(torch.isfinite(self._last_loss)):
            logger.warning("the loss itself is %s on this rank: the fault is in forward or in the data", float(self._last_loss))
        self._prepare_backward()
        every = self.settings.tensor_parallel.check_replicas_every
        if every and self.global_steps % every == 0:
            self.check_replicas()
        self._print_progress(result)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches from `data_iter` (default: the engine's own loader,
        epoch after epoch). The module must return the loss. Returns the mean loss of this rank."""
        source = data_iter if data_iter is not None else self._endless_data()
        total = torch.zeros((), device=self.device)
        self.train()
        for _ in range(self.batch.accumulation):
            loss = self._call(next(source))
            self.backward(loss)
            total += loss.detach().float()
            self.step()
        return total / self.batch.accumulation

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> Any:
        """The module's output on the next batch, in evaluation mode and without gradients."""
        was_training = self.module.training
        self.eval()
        try:
            return self._call(next(data_iter))
        finally:
            self.train(was_training)

    def _call(self, batch: Any) -> Any:
        batch = tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, batch)
        if isinstance(batch, dict):
            return self(**batch)
        return self(*batch) if isinstance(batch, (tuple, list)) else self(batch)

    def _endless_data(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise ValueError("train_batch needs an iterator: the engine was made without training_data")
        if self._data is None:
            loader = self.training_dataloader

            def forever() -> Iterator[Any]:
                while True:
                    yield from loader

            self._data = forever()
        return self._data

    # --- accumulation ---------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decides the boundary by hand instead of counting micro-batches."""
        self._boundary = is_boundary
        self._prepare_backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that are kept whole are not reduced inside. Sharded gradients are: keeping them whole would cost the
        memory that sharding saves."""
        self._syncs = False
        self._prepare_backward()
        try:
            yield
        finally:
            self._syncs = True
            self._prepare_backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the step so far. Collective if there are any."""
        self.mechanism.reducer.forget()
        super().zero_grad(set_to_none)

    def check_replicas(self) -> None:
        """Raises `DivergenceError` if parameters that all ranks of a tensor group hold whole have come apart. Collective; also run
        after every `tensor_parallel.check_replicas_every`-th step."""
        if self.layers is not None:
            check_replicas(self.module, self.mechanism, self.mesh.tensor_control)

    # --- facts ----------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> ZeroOptimizer | None:
        return self.mechanism.optimizer

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a dict, "auto" filled."""
        return self.settings.to_dict(self.batch)

    @property
    def skipped_steps(self) -> int:
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    @property
    def loss_scale(self) -> float:
        return self.optimizer.loss_scale if self.optimizer is not None else 1.0

    def was_step_applied(self) -> bool:
        """The last `step` updated the weights (False before the first, and for a skipped one)."""
        return self.optimizer is not None and self.optimizer.last is not None and self.optimizer.last.applied

    def was_step_clipped(self) -> bool:
        """The last applied `step` scaled its gradients down to gradient_clipping."""
        return self.optimizer is not None and self.optimizer.last is not None and self.optimizer.last.clipped

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the last step's combined gradients before clipping, the same on every rank; None before the first."""
        return self.optimizer.last.norm if self.optimizer is not None and self.optimizer.last is not None else None

    def get_lr(self) -> list[float]:
        return [] if self.optimizer is None else [float(g["lr"]) for g in self.optimizer.param_groups]

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

    @property
    def dp_world_size(self) -> int:
        return self.mesh.data_parallel_size

    def expert_statistics(self) -> dict[str, LayerStatistics]:
        """Of every layer with experts, over the global batch since the last step began: load of each expert, drops, entropy of
        the router, the ranks' skew. Collective."""
        return {} if self.experts is None else self.experts.statistics()

    def memory_report(self) -> dict[str, int]:
        """Bytes by kind that this rank holds now."""
        return report.measured_memory(self.module, self.mechanism)

    def planned_memory(self) -> dict[str, int]:
        """Bytes by kind at rest that the layout predicts."""
        return report.planned_memory(self.module, self.mechanism)

    def traffic(self) -> dict[str, int]:
        """Bytes sent by this rank since `reset_traffic`."""
        return report.traffic(self.mechanism)

    def planned_traffic(self) -> int:
        """Bytes of parameters and gradients that a step should send."""
        return report.planned_traffic(self.mechanism, self.batch.accumulation)

    def reset_traffic(self) -> None:
        report.reset_traffic(self.mechanism)

    def _print_progress(self, result: StepResult) -> None:
        every = self.settings.steps_per_print
        if every is not None and math.isfinite(every) and every > 0 and self.global_steps % int(every) == 0:
            rates = ", ".join(f"{lr:.3g}" for lr in self.get_lr())
            log_rank0(
                f"step {self.global_steps}: lr {rates}, gradient norm {result.norm:.4g}, skipped {self.skipped_steps}"
                + (f", loss scale {self.loss_scale:g}" if self.settings.fp16.enabled else "")
            )
            for name, layer in self.expert_statistics().items():
                log_rank0(f"step {self.global_steps}: {name}: {layer.show()}")
            if self.settings.wall_clock_breakdown:
                spent = ", ".join(f"{name} {1000 * s / int(every):.1f} ms" for name, s in self._times.take().items())
                log_rank0(f"step {self.global_steps}: {spent} a step")
            if self.settings.memory_breakdown:
                held = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in self.memory_report().items())
                log_rank0(f"step {self.global_steps}: this rank holds {held}")

    def _need_optimizer(self, what: str) -> ZeroOptimizer:
        if self._destroyed:
            raise ConfigError(f"engine.{what}: this engine was destroyed; make another with zeroengine.initialize")
        if self.optimizer is None:
            raise ConfigError(
                f"engine.{what}: this engine has no optimizer (evaluation only); give one in the config's `optimizer` section or "
                "to zeroengine.initialize"
            )
        return self.optimizer

    # --- life -----------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Gives the module back, whole and without hooks, and frees everything else. Collective."""
        if self._destroyed:
            return
        self._destroyed = True
        self._end_background_saves()
        self.reload_states()
        self._begin_hook.remove()
        self.mechanism.remove()
        if self.sequences is not None:
            self.sequences.remove(self.module)
        if self.layers is not None:
            self.layers.remove(self.module)
        if self.experts is not None:  # last, as it was put on: other ranks' experts come back as copies of whole ones
            self.experts.remove()
        self.mechanism.optimizer = None
        self.mechanism.gradients.clear()
        if self._owns_mesh:
            self.mesh.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)


SchedulerFactory = Callable[[torch.optim.Optimizer], Any]

__all__ = ["SchedulerFactory", "ZeroEngine"]
