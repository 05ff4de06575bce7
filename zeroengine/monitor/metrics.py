"""The events of a step, for all monitors, and the line of progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from zeroengine.config import Config
from zeroengine.logging import log_rank0
from zeroengine.monitor.observer import Observer, Step
from zeroengine.monitor.phases import StepClock, StepTimes, breakdown, since
from zeroengine.monitor.services import CometSink, WandbSink
from zeroengine.monitor.sinks import CsvSink, Event, JsonlSink, Sink, TensorBoardSink

_TRAIN = "Train/Samples"


def events_of(step: Step, times: StepTimes | None) -> list[Event]:
    """DeepSpeed's names, and more of the same kind. Times with `wall_clock_breakdown` only."""
    values: dict[str, float | None] = {
        "train_loss": step.loss,
        "lr": step.rates[0] if step.rates else None,
        "loss_scale": step.loss_scale,
        "grad_norm": step.norm,
        "skipped_steps": step.skipped,
    }
    if times is not None:
        values |= {f"elapsed_time_ms_{name}": 1000 * seconds for name, seconds in times.phases.items()}
        values |= {f"elapsed_time_ms_{name.replace(' ', '_')}": 1000 * seconds for name, seconds in times.split().items()}
    events: list[Event] = [(f"{_TRAIN}/{name}", value, step.samples) for name, value in values.items() if value is not None]
    for name, layer in step.experts.items():
        at = f"Train/Experts/{name}"
        events += [
            (f"{at}/busiest_expert", layer.imbalance, step.samples),
            (f"{at}/busiest_rank", layer.skew, step.samples),
            (f"{at}/dropped", layer.dropped, step.samples),
            (f"{at}/load", layer.load, step.samples),
        ]
        if layer.entropy is not None:
            events.append((f"{at}/entropy", layer.entropy, step.samples))
    return events


class Monitors(Observer):
    """Writes the events of every step to all sinks; there are sinks on rank 0 only. Also `engine.monitor`."""

    asks_loss = True

    def __init__(self, sinks: Sequence[Sink], clock: StepClock | None) -> None:
        self.sinks = sinks
        self._clock = clock

    @property
    def enabled(self) -> bool:
        """DeepSpeed's name: there is something to write to on this rank."""
        return bool(self.sinks)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Events of the user's own: (name, value, samples). Nothing on ranks without sinks."""
        for sink in self.sinks:
            sink.write(event_list)

    def step_ended(self, step: Step) -> None:
        events = events_of(step, None if self._clock is None else self._clock.last)  # the loss is collective
        self.write_events(events)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.sinks = ()


def wants_sinks(config: Config) -> bool:
    return any(s.enabled for s in (config.tensorboard, config.csv_monitor, config.jsonl_monitor, config.wandb, config.comet))


def open_sinks(config: Config) -> list[Sink]:
    """Of the sections that are enabled. Raises `ConfigError` for a missing package, `OSError` for a folder."""
    made: list[Sink] = []
    if config.tensorboard.enabled:
        made.append(TensorBoardSink(config.tensorboard))
    if config.csv_monitor.enabled:
        made.append(CsvSink(config.csv_monitor))
    if config.jsonl_monitor.enabled:
        made.append(JsonlSink(config.jsonl_monitor))
    if config.wandb.enabled:
        made.append(WandbSink(config.wandb))
    if config.comet.enabled:
        made.append(CometSink(config.comet))
    return made


class Progress(Observer):
    """A line in the log every so many steps: norm, rates, experts; with `clock` the times, with `memory` the bytes held."""

    def __init__(self, every: float, clock: StepClock | None, memory: Callable[[], Mapping[str, int]] | None) -> None:
        self._every = int(every)
        self._clock, self._memory = clock, memory
        self._told = StepTimes()

    @staticmethod
    def wanted(every: float | None) -> bool:
        return every is not None and math.isfinite(every) and every > 0

    def step_ended(self, step: Step) -> None:
        if step.number % self._every:
            return
        head = f"step {step.number}:"
        log_rank0(
            f"{head} lr {', '.join(f'{lr:.3g}' for lr in step.rates)}, gradient norm {step.norm:.4g}, skipped {step.skipped}"
            + (f", loss scale {step.loss_scale:g}" if step.loss_scale is not None else "")
        )
        for name, layer in step.experts.items():
            log_rank0(f"{head} {name}: {layer.show()}")
        if self._clock is not None:
            log_rank0(f"{head} {breakdown(since(self._clock.total, self._told))} a step")
            self._told = StepTimes()
            self._told.add(self._clock.total)
        if self._memory is not None:
            held = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in self._memory().items())
            log_rank0(f"{head} this rank holds {held}")
