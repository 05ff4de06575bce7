"""Sinks that are services: Weights & Biases, Comet."""

from __future__ import annotations

from collections.abc import Sequence

from zeroengine.config.monitoring import CometSection, WandbSection
from zeroengine.monitor.sinks import Event, package, scalars


class WandbSink:
    def __init__(self, section: WandbSection) -> None:
        wandb = package("wandb", "wandb", "wandb")
        self._run = wandb.init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Sequence[Event]) -> None:
        by_samples: dict[int, dict[str, float]] = {}
        for name, value, samples in scalars(events):
            by_samples.setdefault(samples, {})[name] = value
        for samples, found in by_samples.items():
            self._run.log(found, step=samples)

    def close(self) -> None:
        self._run.finish()


class CometSink:
    """An event is sent when `samples_log_interval` samples have passed since its last value."""

    def __init__(self, section: CometSection) -> None:
        comet = package("comet_ml", "comet", "comet_ml")
        options = {
            "project": section.project, "workspace": section.workspace, "api_key": section.api_key,
            "experiment_key": section.experiment_key, "online": section.online, "mode": section.mode,
        }  # fmt: skip
        self._experiment = comet.start(**{name: value for name, value in options.items() if value is not None})
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._sent: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in scalars(events):
            if name not in self._sent or samples >= self._sent[name] + self._interval:
                self._sent[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        self._experiment.end()
