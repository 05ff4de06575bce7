"""`PipelineEngine`: trains a `PipelineModule`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from zeroengine.config import BatchSizes, Config, resolve_batch
from zeroengine.engine.data import EngineLoader, build_loader
from zeroengine.engine.engine import ZeroEngine
from zeroengine.engine.experts import ExpertParallel, groups_of, spread_experts
from zeroengine.engine.mechanism import Mechanism, attach_optimizer, compute_dtype
from zeroengine.engine.pipeline_stages import AcrossStages, StageComms, StageReducers, Ties, build_stages, check_places
from zeroengine.engine.pipeline_weights import PipelineWeightMethods
from zeroengine.errors import ConfigError
from zeroengine.logging import log_rank0
from zeroengine.mesh import Mesh
from zeroengine.offload.inputs import inputs_on_host
from zeroengine.optim.build import check_trainable, optimizer_factory, param_groups
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.pipeline.checks import Checked, check
from zeroengine.pipeline.executor import Executor, Run
from zeroengine.pipeline.module import PipelineModule, zero_of
from zeroengine.pipeline.schedules import forward_schedule
from zeroengine.pipeline.simulate import Span, Timeline
from zeroengine.pipeline.wire import Wire
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.build import check_free
from zeroengine.zero.held import to_device


class PipelineEngine(PipelineWeightMethods, ZeroEngine):
    """Trains a `PipelineModule`: `train_batch` and `eval_batch` take `gradient_accumulation_steps` micro-batches at once.

    Data is read on the rank of the first stage; labels go from there to the last stage, each with its micro-batch. `last_run` is
    what the last pass measured on this rank.
    """

    module: PipelineModule

    def __init__(
        self, module: PipelineModule, config: Config, batch: BatchSizes, mesh: Mesh, owns_mesh: bool, mechanism: Mechanism,
        lr_scheduler: Any, loader: EngineLoader | None, comms: StageComms, ties: Ties, experts: ExpertParallel | None = None,
    ) -> None:  # fmt: skip
        self._comms, self._ties = comms, ties
        self._schedules: dict[tuple[bool, int], Checked] = {}
        self._labels: dict[int, Any] = {}
        self._factors: dict[int, float] = {}
        self._loss_sum = 0.0
        self._ran: Checked | None = None
        self.last_run: Run | None = None
        super().__init__(module, config, batch, mesh, owns_mesh, mechanism, lr_scheduler, loader, experts=experts)
        self._executor = Executor(
            len(module.placement),
            module.placement,
            self._stage_forward,
            comms.stream,
            comms.extra,
            self.device,
            _Hooks(module, mechanism),
        )
        first, last = module.placement[0], module.placement[-1]
        self._holds_first, self._holds_last = module.stage_rank == first, module.stage_rank == last
        self._label_wire: Wire | None = None
        if first != last and (self._holds_first or self._holds_last):
            peer = last if self._holds_first else first
            self._label_wire = Wire(comms.labels, comms.labels_extra, peer, self.device)

    # --- training -------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step over `gradient_accumulation_steps` micro-batches `(inputs, labels)` from `data_iter` (default: the engine's
        loader), which is read on the first stage's ranks only. Returns the mean loss over all micro-batches and data-parallel
        ranks, on every rank. Raises StopIteration on all stages when `data_iter` ends."""
        optimizer = self._need_optimizer("train_batch")
        self.train()
        self._begin_step()
        checked = self.schedule(self.batch.accumulation)
        feed = self._deal(data_iter, self.batch.accumulation)
        self._weigh(self.batch.accumulation, optimizer.scaler.scale)
        loss = self._pass(checked, feed)
        self._last_loss = loss
        self.micro_steps += self.batch.accumulation - 1
        super().step()
        return loss

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None, return_outputs: bool = False) -> Any:
        """Forward only over the next micro-batches, in evaluation mode. Returns the mean loss on every rank; with
        `return_outputs` the list of the last stage's outputs, on its ranks (None elsewhere)."""
        count = num_micro_batches or self.batch.accumulation
        was_training = self.module.training
        self.eval()
        try:
            feed = self._deal(data_iter, count)
            if return_outputs:
                self._labels = {}
                self._factors = {}
            else:
                self._weigh(count, 1.0)
            loss = self._pass(self.schedule(count, trains=False), feed)
        finally:
            self.train(was_training)
        if not return_outputs:
            return loss
        outputs = self.last_run.outputs if self.last_run is not None else {}
        return [outputs[i] for i in range(count)] if self._holds_last else None

    def schedule(self, micro_batches: int, trains: bool = True) -> Checked:
        """The checked schedule of a step."""
        key = (trains, micro_batches)
        if key not in self._schedules:
            module = self.module
            if trains:
                made = module.schedule_rule.build(module.num_stages, micro_batches, module.virtual_stages)
            else:
                made = forward_schedule(module.placement, micro_batches)
            self._schedules[key] = check(made)
        return self._schedules[key]

    def timeline(self) -> Timeline:
        """When each rank of this pipeline computed what in the last pass, in seconds from its start (ranks of one host share
        a clock). Collective over the pipeline."""
        if self.last_run is None or self._ran is None:
            raise ValueError("engine.timeline: nothing ran yet; call train_batch or eval_batch first")
        schedule = self._ran.schedule
        longest = max(len(schedule.compute(r)) for r in range(schedule.size))
        mine = torch.zeros(longest, 2, dtype=torch.float64)
        for i, span in enumerate(self.last_run.spans):
            mine[i, 0], mine[i, 1] = span.start, span.end
        times = self._comms.control.exchange(mine, "timeline").view(schedule.size, longest, 2)
        spans = [
            Span(rank, action, float(times[rank, i, 0]), float(times[rank, i, 1]))
            for rank in range(schedule.size)
            for i, action in enumerate(schedule.compute(rank))
        ]
        start = min(s.start for s in spans)
        moved = [Span(s.rank, s.action, s.start - start, s.end - start) for s in spans]
        return Timeline(schedule, tuple(sorted(moved, key=lambda s: (s.start, s.rank, s.end))))

    # --- one pass -------------------------------------------------------------------------------------------------

    def _deal(self, data_iter: Iterator[Any] | None, count: int) -> dict[int, Any] | None:
        """Reads `count` micro-batches on the first stage's rank and sends their labels to the last one's."""
        feed: dict[int, Any] = {}
        labels: dict[int, Any] = {}
        ended = False
        if self._holds_first:
            source = data_iter if data_iter is not None else self._endless_data()
            for i in range(count):
                try:
                    batch = next(source)
                except StopIteration:
                    ended = True
                    break
                feed[i], labels[i] = self.module.split_batch(tree_map(self._place, batch))
        if bool(self._comms.control.exchange(torch.tensor([ended]).to(torch.int64), "end of the data").any()):
            raise StopIteration(f"the data ended before {count} micro-batches were read")
        wire = self._label_wire
        if wire is not None:
            for i in range(count):
                edge, subject = "labels", f"labels of micro-batch {i}"
                if self._holds_first:
                    wire.send(edge, subject, labels[i])
                else:
                    labels[i] = wire.get(wire.want(edge, subject))
            wire.finish()
        self._labels = labels if self._holds_last else {}
        return feed if self._holds_first else None

    def _place(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype = compute_dtype(self.settings)
        return x.to(self.device, dtype if dtype is not None and x.dtype is torch.float32 else x.dtype)

    def _weigh(self, count: int, loss_scale: float) -> None:
        """What each micro-batch's mean loss counts in the step's: alike, or by its targets over all ranks' targets."""
        self._loss_sum = 0.0
        if not self._holds_last:
            return
        if self.module.loss_weight is None:
            self._factors = {i: loss_scale / count for i in range(count)}
            return
        weights = torch.tensor([float(self.module.loss_weight(self._labels[i])) for i in range(count)], dtype=torch.float64)
        total = float(self.mesh.control.exchange(weights.sum().view(1), "targets of the step").sum())
        each = weights * self.mesh.data_parallel_size * loss_scale / total if total else torch.zeros_like(weights)
        self._factors = dict(enumerate(each.tolist()))

    def _stage_forward(self, stage: int, micro: int, x: Any) -> Any:
        with inputs_on_host(self.settings.activation_checkpointing.cpu_checkpointing):
            output = self.module(x, stage, micro)
        if stage != len(self.module.placement) - 1 or micro not in self._factors:
            return output
        factor = self._factors[micro]
        if factor == 0.0:
            return zero_of(output)
        loss = self.module.loss(output, self._labels.get(micro))
        weighted = loss.float() * factor if isinstance(loss, Tensor) and loss.numel() == 1 else loss
        if isinstance(weighted, Tensor) and weighted.numel() == 1:
            self._loss_sum += float(weighted.detach())
        return weighted

    def _pass(self, checked: Checked, feed: dict[int, Any] | None) -> Tensor:
        self._ran = checked
        self.module.draw = self.global_steps * self.mesh.control.size + self.mesh.control.rank
        try:
            self.last_run = self._executor.run(checked, feed)
        finally:
            self._labels = {}
            self.mechanism.sharder.end_backward()
        scale = self.optimizer.scaler.scale if self.optimizer is not None and checked.schedule.trains else 1.0
        mean = torch.zeros(1, dtype=torch.float64)
        if self._holds_last:
            mean = self.mesh.control.exchange(torch.tensor([self._loss_sum / scale], dtype=torch.float64), "loss").mean().view(1)
        self._comms.control.broadcast(mean, self.module.placement[-1], "loss").wait()
        return mean[0].float().to(self.device)

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Stages run many times in a step: the schedule says when a micro-batch ends."""

    def _prepare_backward(self) -> None:
        scale = self.optimizer.scaler.scale if self.optimizer is not None else 1.0
        self.mechanism.reducer.scale = 1.0 / scale

    # --- what a pipeline does not have ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"rank {self.mesh.rank} holds a part of the model only: use engine.train_batch or engine.eval_batch")

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise ConfigError("a pipeline runs forward, backward and step together: use engine.train_batch")

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        raise ConfigError("a pipeline runs forward, backward and step together: use engine.train_batch")


class _Hooks:
    """Sharded weights and reductions around the computations of a stage."""

    def __init__(self, module: PipelineModule, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        self._first: dict[str, Bucket] = {}
        for bucket in mechanism.buckets:
            if bucket.policy.shard_params:
                self._first.setdefault(module.part_of(bucket.layout.specs[0].name), bucket)

    def gather(self, stage: int) -> None:
        bucket = self._first.get(f"stage {stage}")
        if bucket is not None:
            bucket.gather()

    def before_gradients(self, stage: int, last: bool) -> None:
        self._reducers.before_gradients(f"stage {stage}", last)

    def after_backward(self, stage: int, weights: bool) -> None:
        self._mechanism.sharder.end_backward()
        if weights:
            self._reducers.after_gradients(f"stage {stage}")

    @property
    def _reducers(self) -> StageReducers:
        reducer = self._mechanism.reducer
        if not isinstance(reducer, StageReducers):
            raise TypeError("a pipeline needs the reducers of its stages")
        return reducer


SchedulerBuilder = Callable[[Any, ZeroOptimizer | None, Config], Any]


def initialize_pipeline(
    module: PipelineModule, optimizer: Any, model_parameters: Iterable[Any] | None, training_data: Dataset[Any] | None,
    lr_scheduler: Any, collate_fn: Callable[..., Any] | None, settings: Config, mesh: Mesh, owns_mesh: bool,
    scheduler_builder: SchedulerBuilder,
) -> tuple[PipelineEngine, ZeroOptimizer | None, EngineLoader | None, Any]:  # fmt: skip
    """`initialize` for a pipeline. Collective over the whole job."""
    check_places(module, mesh)
    batch = resolve_batch(settings, mesh.data_parallel_size)
    source = optimizer
    if source is None and settings.optimizer is not None:
        source = optimizer_factory(settings.optimizer.type, settings.optimizer.params, module)
    own = isinstance(source, torch.optim.Optimizer)
    groups = source.param_groups if own else param_groups(module, model_parameters)
    comms = StageComms.of(mesh)
    if source is not None:
        trainable = any(p.requires_grad for p in module.parameters())
        if not bool(comms.control.exchange(torch.tensor([trainable]).to(torch.int64), "trainable stages").any()):
            check_trainable(module, groups)
    check_free(module)
    to_device(module, mesh.fabric.device)
    ties = Ties(module, comms, mesh.fabric.device)
    ties.equalize(module)
    members = groups_of(mesh)
    experts = spread_experts(module, settings, mesh, members, stage=True)
    try:
        mechanism = build_stages(module, settings, members, ties, trains=source is not None)
    except Exception:
        if experts is not None:
            experts.remove()
        raise
    zero_optimizer = None
    if source is not None:
        zero_optimizer = attach_optimizer(mechanism, source, groups, settings)
        across = AcrossStages(ties, members, comms.control)
        zero_optimizer.norm_rule, zero_optimizer.blame_rule = across.norm, across.blame
    scheduler = scheduler_builder(lr_scheduler, zero_optimizer, settings)
    loader = build_loader(training_data, batch.micro, mesh, collate_fn, settings)
    engine = PipelineEngine(module, settings, batch, mesh, owns_mesh, mechanism, scheduler, loader, comms, ties, experts)
    checked = engine.schedule(batch.accumulation)
    log_rank0(
        f"pipeline '{module.schedule_rule.name}': {module.num_stages} ranks, {len(module.placement)} stages, "
        f"{batch.accumulation} micro-batches, x {mesh.data_parallel_size} data-parallel ranks at "
        f"ZeRO stage {settings.zero_optimization.stage}; "
        f"activations held at most, by rank: {', '.join(map(str, checked.peak_live))}"
    )
    return engine, zero_optimizer, loader, scheduler
