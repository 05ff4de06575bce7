"""`ZeroEngine`: a model with its mechanism, and the training step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroengine.comm.together import in_turn
from zeroengine.config import BatchSizes, Config
from zeroengine.engine.checkpointing import CheckpointMethods
from zeroengine.engine.data import EngineLoader
from zeroengine.engine.experts import ExpertParallel
from zeroengine.engine.loops import LoopMethods, TokenByToken
from zeroengine.engine.mechanism import Mechanism, autocast, compute_dtype
from zeroengine.engine.names import ScriptMethods
from zeroengine.engine.observers import explain_exhaustion
from zeroengine.engine.parallel import check_replicas
from zeroengine.engine.parking import OffloadMethods
from zeroengine.engine.reporting import ReportMethods
from zeroengine.engine.state import WeightMethods
from zeroengine.errors import ConfigError
from zeroengine.logging import log_once
from zeroengine.mesh import Mesh
from zeroengine.monitor.observer import Watch
from zeroengine.offload.inputs import inputs_on_host
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.parallel.hf import SharedSequences
from zeroengine.parallel.same import check_same_batch
from zeroengine.parallel.stages import StageSequences
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.zero.hooks import ModuleHook, in_backward
from zeroengine.zero.host import step_ended
from zeroengine.zero.modes import Modes


class ZeroEngine(CheckpointMethods, WeightMethods, OffloadMethods, ReportMethods, ScriptMethods, LoopMethods, nn.Module):
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
        self._hint = TokenByToken(self.zero_optimization_partition_weights())
        self.watch = Watch(mesh.fabric, partial(explain_exhaustion, self))
        self._data: Iterator[Any] | None = None  # the engine's own loader, epoch after epoch
        self._background = None  # saves checkpoints while training goes on, once one was asked for
        self._registered = ()  # objects of the script's own that checkpoints keep
        self._counted_from = 0  # step at which the traffic was last reset
        self._predictions = None  # of the plan that the configuration names, once they were read
        self._destroyed = False
        self._begin_hook = module.register_forward_pre_hook(ModuleHook(self._begin), prepend=True)
        self._prepare_backward()

    # --- forward, backward, step ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. With 16-bit weights, fp32 tensors among the arguments are cast to their type."""
        dtype = compute_dtype(self.settings)
        self._hint.look((args, kwargs))
        if dtype is not None:

            def cast(x: Any) -> Any:
                return x.to(dtype) if isinstance(x, Tensor) and x.dtype is torch.float32 else x

            args, kwargs = tree_map(cast, args), tree_map(cast, kwargs)
        on_host = inputs_on_host(self.settings.activation_checkpointing.cpu_checkpointing)
        with self.watch.phase("forward"), autocast(self.settings, self.device), on_host:
            try:
                if isinstance(self.sequences, SharedSequences):
                    return self.sequences.run(self.module, args, kwargs)
                check_same_batch((args, kwargs), self.mesh.same_sample)
                return self.module(*args, **kwargs)
            except BaseException as error:
                if not isinstance(error, Exception):  # torch runs no hooks after a KeyboardInterrupt or SystemExit
                    self.mechanism.sharder.abandon()
                raise

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

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, tokens: int | float | Tensor | None = None
    ) -> Tensor:
        """Adds the gradients of `loss` (a scalar) / accumulation steps; `scale_wrt_gas=False` says that the loss has been
        divided already. Applies the loss scale of fp16. Reduces while it runs. Returns `loss`.

        With `tokens` the loss is a sum over that many tokens (or whatever it counts; 0 or more), and the step takes the mean over
        all tokens of all its micro-batches and ranks, as one process would on the whole batch. Then every micro-batch of the step,
        on every rank, says its number; gradients that are read before the step are not divided by the tokens yet.
        """
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
        share = 1.0 / self.batch.accumulation if scale_wrt_gas else 1.0
        shown = share
        if tokens is not None or optimizer.tokens is not None:
            self._count_tokens(optimizer, tokens)
            share, shown = 1.0, 1.0 / (self.batch.accumulation * max(float(tokens or 0), 1.0))
        optimizer.losses.append(loss.detach())
        self.watch.add_loss(loss, shown)
        reducer.scale = share / scale
        reducer.mark_backward()
        reducer.guided = True
        try:
            with self.watch.phase("backward"):
                (loss if scale == 1.0 else loss.float() * scale).backward(retain_graph=retain_graph)
        finally:
            reducer.guided = False
            reducer.scale = 1.0 / self.batch.accumulation
        self.mechanism.sharder.end_backward()
        return loss

    def _count_tokens(self, optimizer: ZeroOptimizer, tokens: int | float | Tensor | None) -> None:
        """Adds to the tokens of the step. Refuses what would be neither a mean of means nor a mean over tokens."""
        if tokens is None or (optimizer.tokens is None and self.mechanism.reducer.unfinished):
            raise ValueError("engine.backward: some micro-batches of this step give tokens=... and some do not; give it to all of them")
        if self.sequences is not None:
            raise ValueError("engine.backward(tokens=...): the loss over a shared sequence (mesh.cp) is a mean over all tokens already")
        count = float(tokens)
        if not 0 <= count < math.inf:
            raise ValueError(f"engine.backward: tokens is {count}; it is the number that the loss is a sum over, 0 or more")
        optimizer.tokens = (optimizer.tokens or 0.0) + count

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
        rates = self.get_lr() if self.watch.observers else []
        with self.watch.phase("step"):
            result = optimizer.step()
        step_ended()
        self.micro_steps += 1
        self.global_steps += 1
        self.global_samples += self.batch.train
        self._step_ended = True
        if result.applied and self.experts is not None:
            self.experts.after_step()
        if result.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._prepare_backward()
        every = self.settings.tensor_parallel.check_replicas_every
        if every and self.global_steps % every == 0:
            self.check_replicas()
        self._tell_step(result, rates)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches from `data_iter` (default: the engine's own loader,
        epoch after epoch). The module must return the loss. Returns the mean loss of this rank."""
        source = data_iter if data_iter is not None else self._endless_data()
        total = torch.zeros((), device=self.device)
        self.train()
        # All of them first: data that ends in the middle of a step must not leave half a step behind.
        for batch in [next(source) for _ in range(self.batch.accumulation)]:
            loss = self._call(batch)
            self.backward(loss)
            total += loss.detach().float()
            self.step()
        return total / self.batch.accumulation

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> Any:
        """The module's output on the next batch, in evaluation mode and without gradients."""
        modes = Modes(self.module)
        self.module.eval()
        try:
            return self._call(next(data_iter))
        finally:
            modes.restore()

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
        if self.optimizer is not None:
            self.optimizer.forget_losses()
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
        """Gives the module back, whole and without hooks, and frees everything else, also where a part of that fails: the first
        error is raised at the end. Collective."""
        if self._destroyed:
            return
        self._destroyed = True
        in_turn(
            self._end_background_saves,
            self.watch.close,
            self.reload_states,
            self._begin_hook.remove,
            partial(take_apart, self.module, self.mechanism, self.sequences, self.layers, self.experts),
            self._forget_mechanism,
            *((self.mesh.close,) if self._owns_mesh else ()),
        )

    def _forget_mechanism(self) -> None:
        self.mechanism.optimizer = None
        self.mechanism.gradients.clear()

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


def take_apart(
    module: nn.Module, mechanism: Mechanism | None, sequences: SharedSequences | StageSequences | None,
    layers: TensorParallel | None, experts: ExpertParallel | None,
) -> None:  # fmt: skip
    """Takes off `module` what was put on it, in the order in which it comes off. Collective."""
    in_turn(
        *([mechanism.remove] if mechanism is not None else ()),
        *([partial(sequences.remove, module)] if sequences is not None else ()),
        *([partial(layers.remove, module)] if layers is not None else ()),
        *([experts.remove] if experts is not None else ()),  # last: other ranks' experts come back as copies of whole ones
    )
