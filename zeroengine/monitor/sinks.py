"""Where events go: files here, services in `services.py`. Rank 0 only; a package is imported when its sink is made."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from zeroengine.config.monitoring import CsvMonitorSection, FolderMonitorSection, JsonlMonitorSection
from zeroengine.errors import ConfigError

Value = float | Sequence[int]
Event = tuple[str, Value, int]
"""(name, a number or the loads of experts, samples so far). Names and samples are those of DeepSpeed's monitors."""


class Sink(Protocol):
    def write(self, events: Sequence[Event]) -> None:
        """Events of one moment. A sink that shows numbers only passes over lists."""
        ...

    def close(self) -> None: ...


def scalars(events: Sequence[Event]) -> list[tuple[str, float, int]]:
    return [(name, float(value), samples) for name, value, samples in events if isinstance(value, (int, float))]


def package(name: str, section: str, pip: str) -> Any:
    """The module `name`. Raises `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{section}.enabled is true, and the package `{pip}` is missing on rank 0 ({error}); run `pip install {pip}`, or set "
            f"{section}.enabled to false"
        ) from error


def folder_of(section: FolderMonitorSection | JsonlMonitorSection) -> Path:
    folder = Path(os.path.expanduser(section.output_path or ".")) / section.job_name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class TensorBoardSink:
    def __init__(self, section: FolderMonitorSection) -> None:
        package("tensorboard", "tensorboard", "tensorboard")
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(folder_of(section)))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in scalars(events):
            self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        self._writer.close()


class CsvSink:
    """One file for each name: `Train/Samples/lr` is `Train_Samples_lr.csv` with the columns `step` (samples) and `lr`. What is
    there from an earlier run is continued."""

    def __init__(self, section: CsvMonitorSection) -> None:
        self._folder = folder_of(section)
        self._files: dict[str, TextIO] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in scalars(events):
            csv.writer(self._file(name)).writerow([samples, value])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            self._files[name] = file = path.open("a", newline="", buffering=1)
            if not path.stat().st_size:
                csv.writer(file).writerow(["step", name.rpartition("/")[2]])
        return self._files[name]


class JsonlSink:
    """One object a line: {"samples": .., "events": {name: value}}; a value that is not finite is null."""

    def __init__(self, section: JsonlMonitorSection) -> None:
        self._file = (folder_of(section) / "events.jsonl").open("a", buffering=1)

    def write(self, events: Sequence[Event]) -> None:
        by_samples: dict[int, dict[str, Any]] = {}
        for name, value, samples in events:
            plain = number(value) if isinstance(value, (int, float)) else list(value)
            by_samples.setdefault(samples, {})[name] = plain
        for samples, found in by_samples.items():
            self._file.write(json.dumps({"samples": samples, "events": found}) + "\n")

    def close(self) -> None:
        self._file.close()


def number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
