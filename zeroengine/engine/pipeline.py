"""`PipelineEngine`: trains a `PipelineModule`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroengine.comm.texts import exchange_texts
from zeroengine.config import BatchSizes, Config
from zeroengine.engine.data import EngineLoader
from zeroengine.engine.engine import ZeroEngine
from zeroengine.engine.experts import ExpertParallel
from zeroengine.engine.mechanism import Mechanism, autocast, compute_dtype
from zeroengine.engine.parallel import reduction_factor
from zeroengine.engine.pipeline_names import PipelineScriptMethods
from zeroengine.engine.pipeline_stages import StageComms, StageReducers, Ties
from zeroengine.engine.pipeline_weights import PipelineWeightMethods
from zeroengine.errors import ConfigError, ModelError, OffloadError
from zeroengine.logging import log_once
from zeroengine.mesh import Mesh
from zeroengine.moe.statistics import LayerStatistics
from zeroengine.monitor.observer import Watch
from zeroengine.offload.inputs import inputs_on_host
from zeroengine.parallel.same import check_same_batch
from zeroengine.parallel.stages import StageSequences, StageSharing
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.pipeline.actions import Action, Kind, Schedule
from zeroengine.pipeline.checks import Checked, check
from zeroengine.pipeline.executor import Executor, Run
from zeroengine.pipeline.module import PipelineModule, zero_of
from zeroengine.pipeline.schedules import forward_schedule, whole_backward
from zeroengine.pipeline.simulate import Span, Timeline
from zeroengine.pipeline.wire import Wire
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.modes import Modes


class PipelineEngine(PipelineScriptMethods, PipelineWeightMethods, ZeroEngine):
    """Trains a `PipelineModule`: `train_batch` and `eval_batch` take `gradient_accumulation_steps` micro-batches at once.

    Data is read on the rank of the first stage; labels go from there to the last stage, each with its micro-batch. `last_run` is
    what the last pass measured on this rank.
    """

    module: PipelineModule

    def __init__(
        self, module: PipelineModule, config: Config, batch: BatchSizes, mesh: Mesh, owns_mesh: bool, mechanism: Mechanism,
        lr_scheduler: Any, loader: EngineLoader | None, comms: StageComms, ties: Ties, experts: ExpertParallel | None = None,
        layers: TensorParallel | None = None, sequences: StageSequences | None = None,
    ) -> None:  # fmt: skip
        self._comms, self._ties = comms, ties
        self._sharing = StageSharing(None if layers is None else layers.region, sequences)
        self._heard = sequences is None  # some stage has called the attention over a shared sequence
        self._schedules: dict[tuple[bool, int, bool], Checked] = {}
        self._recomputes = module.recomputes  # of all stages, from the first pass on
        self._labels: dict[int, Any] = {}
        self._factors: dict[int, float] = {}
        self._loss_sum: float | Tensor = 0.0  # on the device, which computes on
        self._loss_factor = 1.0
        self._kept: dict[int, Any] | None = None  # outputs of the last stage in an evaluation that wants them
        self._batch_function, self._given_data = None, None
        self._ran: Checked | None = None
        self.last_run: Run | None = None
        super().__init__(module, config, batch, mesh, owns_mesh, mechanism, lr_scheduler, loader, sequences, layers, experts)
        self._executor = Executor(
            len(module.placement),
            module.placement,
            self._stage_forward,
            comms.stream,
            comms.extra,
            self.device,
            _Hooks(module, mechanism, self._sharing, self.watch),
        )
        first, last = module.placement[0], module.placement[-1]
        self._label_wire: Wire | None = None
        if first != last and (self.is_first_stage() or self.is_last_stage()):
            peer = last if self.is_first_stage() else first
            self._label_wire = Wire(comms.labels, comms.labels_extra, peer, self.device)

    # --- training -------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step over `gradient_accumulation_steps` micro-batches `(inputs, labels)` from `data_iter` (default: the engine's
        loader), which is read on the first stage's ranks only; those that share layers or a sequence must read the same. Returns
        the mean loss over all micro-batches and data-parallel ranks, on every rank. Raises StopIteration on all ranks when
        the `data_iter` of one ends; what the step has read by then is dropped."""
        optimizer = self._need_optimizer("train_batch")
        self.mechanism.placement.check_here()
        self.train()
        self._begin_step()
        feed = self._deal(data_iter, self.batch.accumulation)
        checked = self.schedule(self.batch.accumulation)
        self._weigh(self.batch.accumulation, optimizer.scaler.scale)
        loss = self._pass(checked, feed)
        optimizer.losses.append(loss)
        self.watch.add_loss(loss, 1.0)
        self.micro_steps += self.batch.accumulation - 1
        super().step()
        return loss

    @torch.no_grad()
    def eval_batch(
        self, data_iter: Iterator[Any], num_micro_batches: int | None = None, return_outputs: bool = False, *,
        return_logits: bool = False, compute_loss: bool = True, reduce_output: str | None = "avg", bcast_loss: bool = True,
    ) -> Any:  # fmt: skip
        """Forward only over the next micro-batches, in evaluation mode. Returns the mean loss on every rank; with
        `return_outputs` the list of the last stage's outputs, on its ranks (None elsewhere): of this rank's tokens where ranks
        share a sequence. With `return_logits` (loss, outputs): of all samples one after the other if they are tensors that fit, else
        such a list. `compute_loss=False` is another word for `return_outputs`; `reduce_output` and `bcast_loss` change nothing."""
        count = self.batch.accumulation if num_micro_batches is None else num_micro_batches
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"engine.eval_batch: num_micro_batches is {num_micro_batches!r}; it is a whole number, at least 1")
        self.mechanism.placement.check_here()
        modes = Modes(self.module)
        only_outputs = return_outputs or not compute_loss
        self._kept = {} if return_logits or only_outputs else None
        self.module.eval()
        try:
            feed = self._deal(data_iter, count)
            if only_outputs:
                self._labels = {}
                self._factors = {}
            else:
                self._weigh(count, 1.0)
            loss = self._pass(self.schedule(count, trains=False), feed)
            found = [self._kept[i] for i in range(count)] if self._kept else None
            if self.last_run is not None:
                self.last_run.outputs = {}  # whoever asked has them
        finally:
            self._kept = None
            modes.restore()
        if only_outputs:
            return found
        return (loss, _as_one(found)) if return_logits else loss

    def schedule(self, micro_batches: int, trains: bool = True) -> Checked:
        """The checked schedule of a step. Backward is in one part where a stage computes activations again."""
        key = (trains, micro_batches, trains and self._recomputes)
        if key not in self._schedules:
            module = self.module
            if trains:
                made = module.schedule_rule.build(module.num_stages, micro_batches, module.virtual_stages)
                if self._recomputes:
                    made = self._in_one_part(made)
            else:
                made = forward_schedule(module.placement, micro_batches)
            self._schedules[key] = check(made)
        return self._schedules[key]

    def _in_one_part(self, schedule: Schedule) -> Schedule:
        if any(a.kind is Kind.WEIGHT for actions in schedule.ranks for a in actions):
            log_once(f"schedule '{schedule.name}': layers are computed again in backward, which is therefore made in one part")
        return whole_backward(schedule)

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
        if self.is_first_stage():
            given_data = data_iter if data_iter is not None else self._given_data
            source = given_data if given_data is not None else self._endless_data()
            for i in range(count):
                given, ended = self._read(source)
                check_same_batch(given, self.mesh.same_sample)
                if ended:
                    break
                feed[i], labels[i] = self._sharing.begin(i, *given)
        if self._agree_on_data(ended):
            self._sharing.clear()
            raise StopIteration(f"the data ended before {count} micro-batches were read")
        wire = self._label_wire
        if wire is not None:
            for i in range(count):
                edge, subject = "labels", f"labels of micro-batch {i}"
                if self.is_first_stage():
                    wire.send(edge, subject, labels[i])
                else:
                    labels[i] = wire.get(wire.want(edge, subject))
            wire.finish()
        self._labels = labels if self.is_last_stage() else {}
        return feed if self.is_first_stage() else None

    def _agree_on_data(self, ended: bool) -> bool:
        """Whether the data of one pipeline of the job ended: one that went on alone would wait for the others. Tells the ranks that
        read nothing where the engine's loader stands, for a checkpoint. Collective."""
        loader = self.training_dataloader
        stands = (loader.epoch, loader.position) if loader is not None and self.is_first_stage() else (-1, -1)
        row = torch.tensor([ended, self.module.recomputes, *stands], dtype=torch.int64)
        told = self.mesh.everyone.exchange(row, "end of the data").view(-1, 4).amax(0).tolist()
        self._recomputes = bool(told[1])
        if loader is not None and not self.is_first_stage() and told[2] >= 0:
            loader.epoch, loader.position = told[2:]
        return bool(told[0])

    def _read(self, source: Iterator[Any]) -> tuple[Any, bool]:
        """(inputs and labels of the next micro-batch, whether there is none)."""
        try:
            batch = next(source)
        except StopIteration:
            return (None, None), True
        if self._batch_function is not None:
            batch = self._batch_function(batch)
        return self.module.split_batch(tree_map(self._place, batch)), False

    def _place(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype = compute_dtype(self.settings)
        return x.to(self.device, dtype if dtype is not None and x.dtype is torch.float32 else x.dtype)

    def _weigh(self, count: int, loss_scale: float) -> None:
        """What each micro-batch's mean loss counts in the step's: alike, or by its targets over all ranks' targets."""
        self._loss_sum, self._loss_factor = 0.0, float(self.mesh.control.size)
        if not self.is_last_stage():
            return
        if self.module.loss_weight is None:
            self._factors = {i: loss_scale / count for i in range(count)}
            return
        weights = torch.tensor([float(self.module.loss_weight(self._labels[i])) for i in range(count)], dtype=torch.float64)
        total = float(self.mesh.control.exchange(weights.sum().view(1), "targets of the step").sum())
        self._loss_factor = reduction_factor(self.settings, self.mesh)
        each = weights * self._loss_factor * loss_scale / total if total else torch.zeros_like(weights)
        self._factors = dict(enumerate(each.tolist()))

    def _stage_forward(self, stage: int, micro: int, x: Any) -> Any:
        sharing, last = self._sharing, stage == len(self.module.placement) - 1
        given = sharing.unpack(micro, x) if stage else x
        sharing.use(micro)
        self.module.split_tokens = sharing.length() if stage else 0
        with autocast(self.settings, self.device), inputs_on_host(self.settings.activation_checkpointing.cpu_checkpointing):
            output = self.module(given, stage, micro)
            return self._weighted_loss(micro, output) if last else sharing.pack(micro, output)

    def _weighted_loss(self, micro: int, output: Any) -> Any:
        """What the last stage's backward starts from; the output itself where nothing is weighed."""
        if self._kept is not None:
            self._kept[micro] = output.detach() if isinstance(output, Tensor) else output
        if micro not in self._factors:
            return output
        factor = self._factors[micro]
        if factor == 0.0:
            return zero_of(output)
        loss = self.module.loss(output, self._labels.get(micro))
        weighted = loss.float() * factor if isinstance(loss, Tensor) and loss.numel() == 1 else loss
        if isinstance(weighted, Tensor) and weighted.numel() == 1:
            self._loss_sum = self._loss_sum + weighted.detach().double()
        return weighted

    def _pass(self, checked: Checked, feed: dict[int, Any] | None) -> Tensor:
        self._ran = checked
        self.module.draw = self.global_steps * self.mesh.control.size + self.mesh.control.rank
        try:
            with self.mechanism.placement.going_on():
                self.last_run = self._executor.run(checked, feed)
        finally:
            self._labels = {}
            self._sharing.clear()
            self.mechanism.sharder.end_backward()
        self._agree_on_values()
        self._check_heard()
        scale = self.optimizer.scaler.scale if self.optimizer is not None and checked.schedule.trains else 1.0
        mean = torch.zeros(1, dtype=torch.float64)
        if self.is_last_stage():
            table = self.mesh.control.exchange(torch.tensor([float(self._loss_sum) / scale], dtype=torch.float64), "loss")
            mean = table.sum().view(1) / self._loss_factor
        self._comms.control.broadcast(mean, self.module.placement[-1], "loss").wait()
        return mean[0].float().to(self.device)

    def _agree_on_values(self) -> None:
        """Raises `OffloadError` on all ranks if one could not read the weights of a stage. Collective where a disk is used."""
        try:
            self.mechanism.placement.agree(self.mesh.control, "a pass through the stages", "Nothing was changed")
        except OffloadError:
            self.mechanism.reducer.forget()
            raise

    def _check_heard(self) -> None:
        """Raises `ModelError` on all stages if attention ran on the slices of a shared sequence. Collective in the first pass."""
        if not self._heard:
            calls = self._comms.control.exchange(torch.tensor([self._sharing.calls()]), "attention over shared sequences")
            self._heard = bool(calls.any())
        if not self._heard:
            raise ModelError(
                f"mesh.cp is {self.mesh.degrees.cp}, and no layer of any stage called the attention over a shared sequence: each would see "
                "one slice; set mesh.cp to 1, or let the layers call zeroengine.sequence.shared.shared_attention"
            )

    def _all_expert_statistics(self) -> Mapping[str, LayerStatistics]:
        """Of all stages."""
        mine = {name: dataclasses.asdict(layer) for name, layer in self.expert_statistics().items()}
        found: dict[str, LayerStatistics] = {}
        for text in exchange_texts(self._comms.control, json.dumps(mine), "statistics of the experts"):
            for name, values in json.loads(text).items():
                found[name] = LayerStatistics(**{**values, "load": tuple(values["load"])})
        return found

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


def _as_one(outputs: list[Any] | None) -> Any:
    """Outputs of micro-batches as one tensor, if they are tensors of one shape but for the samples."""
    if outputs is None or not all(isinstance(o, Tensor) and o.dim() for o in outputs):
        return outputs
    return torch.cat(outputs) if len({o.shape[1:] for o in outputs}) == 1 else outputs


class _Hooks:
    """Sharded weights and reductions around the computations of a stage."""

    def __init__(self, module: PipelineModule, mechanism: Mechanism, sharing: StageSharing, watch: Watch) -> None:
        self._mechanism, self._sharing, self._watch = mechanism, sharing, watch
        self._first: dict[str, Bucket] = {}
        for bucket in mechanism.buckets:
            if bucket.policy.shard_params:
                self._first.setdefault(module.part_of(bucket.layout.specs[0].name), bucket)

    def gather(self, stage: int) -> None:
        bucket = self._first.get(f"stage {stage}")
        if bucket is not None:
            bucket.gather()

    def before_backward(self, micro: int) -> None:
        self._sharing.use(micro)

    def before_gradients(self, stage: int, last: bool) -> None:
        self._reducers.before_gradients(f"stage {stage}", last)

    def after_backward(self, stage: int, weights: bool) -> None:
        self._mechanism.sharder.end_backward()
        if weights:
            self._reducers.after_gradients(f"stage {stage}")

    def computing(self, action: Action) -> AbstractContextManager[None]:
        name = "forward" if action.kind is Kind.FORWARD else "backward"
        return self._watch.phase(name, f"of stage {action.stage}, micro-batch {action.micro}")

    @property
    def _reducers(self) -> StageReducers:
        reducer = self._mechanism.reducer
        if not isinstance(reducer, StageReducers):
            raise TypeError("a pipeline needs the reducers of its stages")
        return reducer
