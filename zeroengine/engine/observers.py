"""From the configuration to the observers of an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from zeroengine.checkpoint import Ranks
from zeroengine.comm.together import together
from zeroengine.config import Config
from zeroengine.device import DTYPES
from zeroengine.engine import report
from zeroengine.engine.reporting import ReportMethods
from zeroengine.monitor.comms import CommsLogger
from zeroengine.monitor.exhausted import Layout, explain, is_exhaustion
from zeroengine.monitor.flops import FlopsProfiler
from zeroengine.monitor.metrics import Monitors, Progress, open_sinks, wants_sinks
from zeroengine.monitor.phases import StepClock
from zeroengine.monitor.recorder import Recorder
from zeroengine.monitor.sinks import Sink
from zeroengine.monitor.trace import ScheduledTrace

_LARGEST = 10  # buckets in a snapshot


def observe(engine: ReportMethods) -> None:
    """Adds the observers that the configuration asks for: none, by default, but the line of progress. Collective where monitors,
    records or predictions are asked for. Raises `ConfigError` on all ranks for what cannot be opened."""
    settings, watch, everyone = engine.settings, engine.watch, engine.mesh.everyone
    records = settings.monitor.run_dir is not None
    if settings.monitor.plan is not None or settings.monitor.predicted is not None:
        together(everyone, "the predictions of the run", engine.predictions)
    clock = StepClock() if settings.wall_clock_breakdown or records else None
    if clock is not None:
        watch.add(clock)
    told = clock if settings.wall_clock_breakdown else None
    if Progress.wanted(settings.steps_per_print):
        watch.add(Progress(settings.steps_per_print or 0, told, engine.memory_report if settings.memory_breakdown else None))
    if wants_sinks(settings):
        watch.add(Monitors(together(everyone, "opening the monitors", partial(_sinks, settings, engine.mesh.rank)), told))
    if settings.comms_logger.enabled:
        gather = partial(_gather, "the log of the communication")
        watch.add(CommsLogger(settings.comms_logger, engine.dims_of, gather))
    if settings.flops_profiler.enabled:
        watch.add(FlopsProfiler(settings.flops_profiler, engine.module, engine.mesh.rank, DTYPES[settings.dtype]))
    if settings.torch_profiler.enabled:
        watch.add(ScheduledTrace(settings.torch_profiler, engine.mesh.rank))
    if clock is not None and settings.monitor.run_dir is not None:
        watch.add(together(everyone, "opening the records of monitor.run_dir", partial(_recorder, engine, clock)))


def explain_exhaustion(engine: ReportMethods, phase: str, error: BaseException) -> BaseException | None:
    """What to raise where memory ran out in a phase of `engine`; None for any other error."""
    if not is_exhaustion(error):
        return None
    zero, folder = engine.settings.zero_optimization, engine.settings.monitor.run_dir
    device, buckets = engine.mesh.fabric.device, engine.mechanism.buckets
    accumulation = engine.batch.accumulation
    planned = report.planned_in_step(engine.module, engine.mechanism, accumulation, zero)
    several = report.planned_in_step(engine.module, engine.mechanism, max(accumulation, 2), zero)
    layout = Layout(
        zero.stage, engine.mesh.fabric.world_size, engine.batch.micro, accumulation, zero.offload_param.device,
        zero.offload_optimizer.device, device.type != "cpu", planned,
        report.planned_at_stages(engine.module, engine.mechanism, accumulation, zero), engine.predictions().get("others", ()),
        sum(several.values()) - sum(planned.values()),
    )  # fmt: skip
    largest = sorted(((b.subject, b.layout.padded * b.dtype.itemsize) for b in buckets), key=lambda x: -x[1])[:_LARGEST]
    held = report.measured_memory(engine.module, engine.mechanism)
    return explain(error, phase, engine.mesh.rank, device, layout, held, None if folder is None else Path(folder), largest)


def _sinks(settings: Config, rank: int) -> list[Sink]:
    return open_sinks(settings) if rank == 0 else []


def _recorder(engine: ReportMethods, clock: StepClock) -> Recorder:
    section = engine.settings.monitor
    return Recorder(Path(section.run_dir or "."), engine, engine.mesh.fabric, clock, section.timeline_step, section.loss_every)


def _gather(doing: str, text: str) -> list[str]:
    return Ranks.of_job().phase(doing, lambda: text)
