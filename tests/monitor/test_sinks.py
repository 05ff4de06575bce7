"""Sinks by themselves: services, packages that are missing, intervals; and an error that all ranks share."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.jobs import make
from tests.ranks import run_ranks
from zeroengine.config import Config
from zeroengine.config.monitoring import CometSection, CsvMonitorSection, JsonlMonitorSection, WandbSection
from zeroengine.errors import ConfigError
from zeroengine.monitor.metrics import open_sinks
from zeroengine.monitor.services import CometSink, WandbSink
from zeroengine.monitor.sinks import CsvSink, JsonlSink

EVENTS: list[Any] = [("Train/Samples/lr", 0.5, 8), ("Train/Experts/moe/load", (3, 1), 8), ("Train/Samples/train_loss", 2.0, 8)]


class Recorded:
    """Stands for a service's package, and notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorded:
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", service)  # type: ignore[arg-type]
    sink = WandbSink(WandbSection(enabled=True, project="p", group="g", team="t"))
    sink.write(EVENTS)
    sink.close()
    assert service.calls == [
        ("init", (), {"project": "p", "group": "g", "entity": "t"}),
        ("log", ({"Train/Samples/lr": 0.5, "Train/Samples/train_loss": 2.0},), {"step": 8}),
        ("finish", (), {}),
    ]


def test_comet_sends_every_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Recorded()
    monkeypatch.setitem(sys.modules, "comet_ml", service)  # type: ignore[arg-type]
    sink = CometSink(CometSection(enabled=True, project="p", samples_log_interval=20, experiment_name="e"))
    for samples in (8, 16, 24, 32, 40):
        sink.write([("lr", 0.5, samples)])
    sink.close()
    assert service.calls[:2] == [("start", (), {"project": "p"}), ("set_name", ("e",), {})]
    assert [kwargs["step"] for name, _, kwargs in service.calls if name == "log_metric"] == [8, 32]
    assert service.calls[-1][0] == "end"


@pytest.mark.parametrize(
    ("section", "module", "pip"),
    [("tensorboard", "tensorboard", "tensorboard"), ("wandb", "wandb", "wandb"), ("comet", "comet_ml", "comet_ml")],
)
def test_a_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch, section: str, module: str, pip: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{section}\.enabled is true.*pip install {pip}"):
        open_sinks(Config.load({"train_batch_size": 1, section: {"enabled": True}}))


def test_optional_packages_are_imported_only_when_enabled(tmp_path: Path) -> None:
    before = set(sys.modules)
    assert open_sinks(Config.load({"train_batch_size": 1, "tensorboard": {"enabled": False}, "wandb": {"enabled": False}})) == []
    assert not {m for m in set(sys.modules) - before if m.startswith(("tensorboard", "wandb", "comet"))}


def test_files_are_continued_and_lists_go_to_json_only(tmp_path: Path) -> None:
    where = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    for samples in (8, 16):
        for sink in (CsvSink(CsvMonitorSection(**where)), JsonlSink(JsonlMonitorSection(**where))):
            sink.write([(name, value, samples) for name, value, _ in EVENTS] + [("nan", float("nan"), samples)])
            sink.close()
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text().split() == ["step,lr", "8,0.5", "16,0.5"]
    assert sorted(p.name for p in (tmp_path / "job").iterdir()) == [
        "Train_Samples_lr.csv", "Train_Samples_train_loss.csv", "events.jsonl", "nan.csv",
    ]  # fmt: skip
    lines = [json.loads(x) for x in (tmp_path / "job" / "events.jsonl").read_text().splitlines()]
    assert [x["samples"] for x in lines] == [8, 16]
    assert lines[0]["events"]["Train/Experts/moe/load"] == [3, 1] and lines[0]["events"]["nan"] is None


def refused(rank: int, world: int, folder: str) -> list[str]:
    """A package that only rank 0 lacks, a folder that cannot be made: every rank has the error, and the model is as before."""
    found = []
    if rank == 0:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    else:
        sys.modules["wandb"] = types.ModuleType("wandb")
    (Path(folder) / f"file{rank}").write_text("")
    for more in (
        {"wandb": {"enabled": True}},
        {"csv_monitor": {"enabled": True, "output_path": f"{folder}/file0"}},
        {"monitor": {"run_dir": f"{folder}/file{rank}/run"}},
    ):
        try:
            make(2, **more)
        except ConfigError as error:
            found.append(str(error))
    engine = make(2)  # the job goes on
    engine.destroy()
    return found


@pytest.mark.ranks
def test_what_cannot_be_opened_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for found in run_ranks(refused, 2, str(tmp_path), timeout=60):
        assert len(found) == 3
        assert "pip install wandb" in found[0] and "opening the monitors" in found[1] and "monitor.run_dir" in found[2]
