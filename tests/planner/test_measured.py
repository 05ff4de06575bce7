"""Plans against what two ranks hold and send: the bytes are equal, not near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.page_check import faults
from tests.planner import common
from tests.ranks import run_ranks
from zeroengine.launcher.cli import main
from zeroengine.planner.plan import Plan, Planner
from zeroengine.planner.time import by_dim

AT_REST = ("parameters", "gradients", "optimizer", "disk")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that the command chose and wrote: a pipeline, so that all kinds of predictions are in it."""
    folder = tmp_path_factory.mktemp("planned")
    model, machine, base, out = (folder / name for name in ("model", "machine.json", "base.json", "plan.json"))
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **common.source("llama").config.to_diff_dict()}))
    common.cpu().save(machine)
    base.write_text(json.dumps({"steps_per_print": None, "monitor": {"run_dir": str(folder / "run")}}))
    options = ["--gpus", "2", "--batch", "8", "--sequence", str(common.SEQUENCE), "--dtype", "fp32", "--pp", "2", "--tp", "1"]
    options += ["--stage", "1,2", "--micro-batch", "1,2", "--recompute", "no", "--hardware", str(machine), "--config", str(base)]
    assert main(["plan", "--model", str(model), *options, "--write", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, written: Path) -> list[dict[str, Any]]:
    return run_ranks(common.measured, 2, str(tmp_path_factory.mktemp("state")), str(written), timeout=180.0)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    found = {}
    for name, (kind, batch, layout) in common.LAYOUTS.items():
        made = Planner(common.source(kind), common.job(2, batch)).plan(layout)
        assert isinstance(made, Plan), made.why_not
        found[name] = made
    return found


@pytest.mark.parametrize("name", common.LAYOUTS)
def test_memory_at_rest_is_what_the_engine_holds(name: str, measured: list[dict[str, Any]], plans: dict[str, Plan]) -> None:
    for rank in plans[name].ranks:
        planned = {kind: rank.memory.kinds()[kind] for kind in AT_REST}
        assert planned == {kind: measured[rank.rank][name]["memory"][kind] for kind in AT_REST}


@pytest.mark.parametrize("name", common.LAYOUTS)
def test_bytes_of_every_collective_are_those_sent(name: str, measured: list[dict[str, Any]], plans: dict[str, Plan]) -> None:
    for rank in plans[name].ranks:
        sent = {n: float(size) for n, size in measured[rank.rank][name]["sent"].items() if by_dim({n: size})}
        assert rank.sent == sent


@pytest.mark.parametrize("name", common.LAYOUTS)
def test_activations_are_those_that_autograd_keeps(name: str, measured: list[dict[str, Any]], plans: dict[str, Plan]) -> None:
    layout = common.LAYOUTS[name][2]
    message = layout.micro * common.SEQUENCE * 32 * 4 + 16 if layout.pp > 1 else 0  # one may have left already, or not yet
    for rank in plans[name].ranks:
        planned = rank.memory.activations
        assert abs(measured[rank.rank][name]["activations"] - planned) <= 0.03 * planned + message


def test_the_written_configuration_runs_and_its_report_has_what_was_predicted(written: Path, measured: list[dict[str, Any]]) -> None:
    config = json.loads(written.read_text())
    said, ran = config["monitor"]["predicted"], measured[0]["written"]
    assert ran["degrees"]["pp"] == config["mesh"]["pp"] == 2
    assert ran["stage"] == config["zero_optimization"]["stage"]
    assert ran["accumulation"] == config["train_batch_size"] // config["train_micro_batch_size_per_gpu"]
    report = ran["report"]
    assert not faults(ran["page"], report)
    assert {p["phase"]: p["predicted"] for p in report["time"]["phases"]} == said["time"]
    rows = {row["kind"]: row for row in report["memory"]}
    for kind in ("parameters", "gradients", "optimizer"):
        assert rows[kind]["predicted"] == rows[kind]["measured"] > 0
    kept = next(row for row in report["peak"] if row["kind"] == "activations")
    assert kept["predicted"] == said["memory"]["activations"]
    assert 0 < kept["measured"] <= kept["predicted"] * 1.03
    sent = {f"{r['stream']}.{r['operation']}": r for r in report["traffic"]}
    for name, predicted in (("pipeline.send", None), ("labels.send", None)):
        both = [said["traffic"][place].get(name) for place in ("0", "1") if said["traffic"][place].get(name)]
        assert both, (name, predicted)
        assert sent[name]["predicted"] == pytest.approx(sum(both) / len(both))
    assert sent["pipeline.send"]["measured"] == pytest.approx(sent["pipeline.send"]["predicted"], rel=0.1)  # the first step tells layouts


def test_out_of_memory_names_what_the_plan_found(written: Path, measured: list[dict[str, Any]]) -> None:
    others = json.loads(written.read_text())["monitor"]["predicted"]["others"]
    told = measured[0]["written"]["told"]
    assert "out of memory in forward" in told
    assert "zerorun plan --gpus 2" in told
    assert all(f"{other['layout']}, of zerorun plan" in told for other in others)
