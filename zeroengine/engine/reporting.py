"""What an engine says of itself: bytes held and moved, experts, the report; and what it tells its observers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroengine.checkpoint import Ranks
from zeroengine.config import BatchSizes, Config
from zeroengine.engine import report
from zeroengine.engine.experts import ExpertParallel
from zeroengine.engine.mechanism import Mechanism
from zeroengine.errors import ConfigError
from zeroengine.mesh import DIMS, Mesh
from zeroengine.moe.statistics import LayerStatistics
from zeroengine.monitor.comms import CommsLogger
from zeroengine.monitor.document import Report, assemble
from zeroengine.monitor.metrics import Monitors
from zeroengine.monitor.observer import Step, Watch
from zeroengine.monitor.record import RankRecord, predicted_traffic, read_lines, read_plan
from zeroengine.monitor.recorder import Recorder, moved_so_far, resident
from zeroengine.monitor.trace import TorchTrace
from zeroengine.optim.optimizer import StepResult
from zeroengine.zero.tensor import whole_shape


class ReportMethods:
    """Methods of `ZeroEngine` that measure it."""

    module: nn.Module
    settings: Config
    batch: BatchSizes
    mesh: Mesh
    mechanism: Mechanism
    experts: ExpertParallel | None
    watch: Watch
    global_steps: int
    global_samples: int
    _counted_from: int
    _predictions: dict[str, Any] | None

    if TYPE_CHECKING:

        def get_lr(self) -> list[float]: ...

        @property
        def skipped_steps(self) -> int: ...

        @property
        def loss_scale(self) -> float: ...

    # --- bytes and experts ------------------------------------------------------------------------------------------

    def expert_statistics(self) -> dict[str, LayerStatistics]:
        """Of every layer with experts, over the global batch since the last step began: load of each expert, drops, entropy of
        the router, the ranks' skew. Collective."""
        return {} if self.experts is None else self.experts.statistics()

    def memory_report(self) -> dict[str, int]:
        """Bytes by kind that this rank holds now."""
        return report.measured_memory(self.module, self.mechanism)

    def planned_memory(self) -> dict[str, int]:
        """Bytes by kind at rest that the layout predicts."""
        return report.planned_memory(self.module, self.mechanism, self.batch.accumulation)

    def traffic(self) -> dict[str, int]:
        """Bytes sent by this rank since `reset_traffic`."""
        return report.traffic(self.mechanism)

    def planned_traffic(self) -> int:
        """Bytes of parameters and gradients that a step should send."""
        return round(sum(report.planned_traffic(self.mechanism, self.batch.accumulation).values()))

    def reset_traffic(self) -> None:
        report.reset_traffic(self.mechanism)
        self._counted_from = self.global_steps

    # --- observers ----------------------------------------------------------------------------------------------------

    @property
    def monitor(self) -> Monitors:
        """The monitors of the configuration: `engine.monitor.write_events([(name, value, engine.global_samples)])`."""
        return self._observer(Monitors) or Monitors((), None)

    def log_summary(self, show_straggler: bool = False) -> str:
        """The table of `comms_logger` for this rank. With `show_straggler` collective. Raises `ConfigError` if it is off."""
        found = self._observer(CommsLogger)
        if found is None:
            raise ConfigError("engine.log_summary: set comms_logger.enabled to true in the configuration")
        return found.summary(show_straggler)

    @contextlib.contextmanager
    def profile(self, folder: str | Path, **options: Any) -> Iterator[Any]:
        """Traces what runs inside with torch.profiler, on this rank, into `folder/rank-<N>.json` (Chrome's format), with ranges for
        phases and for operations on buckets. `options` go to `torch.profiler.profile`, which is given."""
        trace = TorchTrace(Path(folder), self.mesh.rank, options)
        self.watch.add(trace)
        try:
            trace.start()
            yield trace.profiler
            trace.stop()
        finally:
            self.watch.remove(trace)

    def _observer(self, kind: Any) -> Any:
        return next((o for o in self.watch.observers if isinstance(o, kind)), None)

    def _tell_step(self, result: StepResult, rates: list[float]) -> None:
        """Tells the observers of an update that was made with `rates`."""
        if not self.watch.observers:
            return
        scale = self.loss_scale if self.settings.fp16.enabled else None
        self.watch.step_ended(
            Step(
                self.global_steps, self.global_samples, result.norm, result.applied, self.skipped_steps, tuple(rates), scale,
                time.perf_counter(), self._mean_loss, self._all_expert_statistics,
            )
        )  # fmt: skip

    def _mean_loss(self) -> float | None:
        mine = self.watch.take_loss()
        row = torch.tensor([0.0 if mine is None else mine, float(mine is not None)], dtype=torch.float64)
        total, ranks = self.mesh.control.exchange(row, "loss").sum(0).tolist()
        return total / ranks if ranks else None

    def _all_expert_statistics(self) -> Mapping[str, LayerStatistics]:
        return self.expert_statistics()

    # --- the report ---------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Predicted beside measured: memory by kind, bytes by collective and dimension of the mesh, time by phase. `text()`,
        `json()` and `html()` on every rank. Steps, times and plots are there with `monitor.run_dir`. Collective."""
        recorder: Recorder | None = self._observer(Recorder)
        if recorder is not None:
            recorder.rest()
            mine = RankRecord.of(read_lines(recorder.path))
        else:
            mine = self._record_of_now()
        lines = Ranks.of_job().phase("the report", lambda: json.dumps(list(mine.lines())))
        return assemble(self.run_facts(), [RankRecord.of(json.loads(text)) for text in lines])

    def _record_of_now(self) -> RankRecord:
        """Without a recorder: what the counters say, as if all steps since their reset had been alike."""
        steps = max(self.global_steps - self._counted_from, 1)
        moved = [[*key, sent / steps, calls / steps] for key, (sent, calls) in moved_so_far(self.mesh.fabric).items()]
        step = {"kind": "step", "number": self.global_steps, "moved": moved}
        rest = {"kind": "rest", "memory": self.memory_report(), "resident": resident(self.mesh.fabric.device)}
        return RankRecord.of([{"kind": "start", **self.rank_facts(), "number": 0}, rest, step])

    def run_facts(self) -> dict[str, Any]:
        """The whole run's: its shape and its configuration."""
        return {
            "world": self.mesh.fabric.world_size,
            "mesh": {name: size for name, size in self.mesh.degrees.sizes().items() if size > 1},
            "stage": self.settings.zero_optimization.stage,
            "dtype": self.settings.dtype,
            "device": self.mesh.fabric.device.type,
            "model": type(self.module).__name__,
            "batch": {"train": self.batch.train, "micro": self.batch.micro, "accumulation": self.batch.accumulation},
            "config": self.settings.to_dict(self.batch),
            "plan": self.predictions(),
        }

    def predictions(self) -> dict[str, Any]:
        """What `monitor.plan` or `monitor.predicted` says of this run; read once. Raises `ConfigError` for what is no prediction."""
        if self._predictions is None:
            section = self.settings.monitor
            self._predictions = read_plan(section.plan, section.predicted)
        return self._predictions

    def rank_facts(self) -> dict[str, Any]:
        """This rank's: its place, what it holds, and what is predicted of it. Bytes, of a step where they move."""
        traffic = dict(predicted_traffic(self.predictions(), self.mesh.coordinate("pp")))
        traffic |= report.planned_traffic(self.mechanism, self.batch.accumulation)  # the layout knows better
        streams = {comm.name: self.dims_of(comm.ranks) for comm in self.mesh.fabric.communicators if comm.size > 1}
        return {
            "rank": self.mesh.rank,
            "host": socket.gethostname(),
            "number": self.global_steps,
            "place": {name: self.mesh.coordinate(name) for name in DIMS if getattr(self.mesh.degrees, name) > 1},
            "parameters": sum(whole_shape(p).numel() for p in self.module.parameters()),
            "streams": streams,
            "predicted": {
                "memory": self.planned_memory(),
                "traffic": [[*key.split(".", 1), round(sent)] for key, sent in traffic.items() if sent],
            },
        }

    def dims_of(self, ranks: tuple[int, ...]) -> str:
        """The dimensions of the mesh along which `ranks` differ, as in "dp_shard x cp"."""
        places = [self.mesh.degrees.coordinates(r) for r in ranks]
        return " x ".join(name for name in DIMS if len({place[name] for place in places}) > 1) or "-"
