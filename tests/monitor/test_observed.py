"""All monitors on two ranks at every stage: what they write is right, and training does not notice them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.jobs import ACCUMULATION, STEPS, observed
from tests.monitor.page_check import faults, value_at
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError
from zeroengine.monitor.command import run as report_command
from zeroengine.monitor.document import assemble
from zeroengine.monitor.record import RankRecord, predicted_traffic, read_plan, read_run

STAGES = ("0", "1", "2", "3")
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(observed, 2, str(folder), timeout=150)


@pytest.mark.parametrize("stage", STAGES)
def test_training_is_the_same_to_the_last_bit_and_nothing_stays(ranks: list[dict[str, Any]], stage: str) -> None:
    for got in (r[stage] for r in ranks):
        assert got["same"] and got["hooks"] == got["hooks left"] and not got["modes"]
        assert not got["unheard"], "a communicator tells somebody though no monitor is on"
        assert not got["after"]


@pytest.mark.parametrize("stage", STAGES)
def test_events_have_deepspeeds_names_and_their_values(ranks: list[dict[str, Any]], folder: Path, stage: str) -> None:
    here, got = folder / f"stage{stage}", ranks[0][stage]
    lines = [json.loads(line) for line in (here / "lines" / "events.jsonl").read_text().splitlines()]
    assert lines.pop()["events"] == {"Mine/value": 2.5}
    assert [line["samples"] for line in lines] == [8 * (i + 1) for i in range(STEPS)]
    mean = [sum(r[stage]["losses"][i] for r in ranks) / 2 for i in range(STEPS)]
    assert [line["events"]["Train/Samples/train_loss"] for line in lines] == pytest.approx(mean, rel=1e-5)
    last = lines[-1]["events"]
    assert last["Train/Samples/lr"] == got["rates"][0] and last["Train/Samples/grad_norm"] == got["norm"]
    assert "Train/Samples/loss_scale" not in last and last["Train/Samples/skipped_steps"] == 0
    assert all(last[f"Train/Samples/elapsed_time_ms_{name}"] > 0 for name in ("forward", "backward", "step", "compute", "optimizer"))
    rows = list(csv.reader((here / "csv" / "Train_Samples_train_loss.csv").open()))
    assert rows[0] == ["step", "train_loss"]
    assert [[int(a), float(b)] for a, b in rows[1:]] == [[x["samples"], x["events"]["Train/Samples/train_loss"]] for x in lines]
    assert got["enabled"] and not ranks[1][stage]["enabled"]


@pytest.mark.parametrize("stage", STAGES)
def test_tensorboard_has_the_same_events(ranks: list[dict[str, Any]], folder: Path, stage: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / f"stage{stage}" / "board"))
    board.Reload()
    lines = [json.loads(x) for x in (folder / f"stage{stage}" / "lines" / "events.jsonl").read_text().splitlines()]
    for name in ("Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/elapsed_time_ms_forward"):
        expected = [(x["samples"], x["events"][name]) for x in lines if name in x["events"]]
        assert [(e.step, e.value) for e in board.Scalars(name)] == [(s, pytest.approx(v, rel=1e-6)) for s, v in expected]


@pytest.mark.parametrize("stage", STAGES)
def test_the_log_of_collectives_adds_up(ranks: list[dict[str, Any]], stage: str) -> None:
    for got in (r[stage] for r in ranks):
        text = got["summary"]
        assert "for slower ranks" in text and "dp_shard" in text and "GB/s" in text
        assert ("what" in text.splitlines()[0].split()) is (stage == "3")
        planned, sent = got["planned traffic"] * STEPS, _sent(text)
        # backward does not read the embedding's values at stage 3, and one more gather precedes the first step
        assert sent == pytest.approx(planned, rel=0.02) if stage != "3" else 0.75 * planned < sent <= 1.02 * planned


def _sent(summary: str) -> float:
    """Bytes of parameters and gradients in the column "in all"."""
    units, total = {"B": 1, "KiB": 2**10, "MiB": 2**20}, 0.0
    for line in summary.splitlines()[2:]:
        stream, *_ = line.split()
        if stream in ("params", "grads", "replicas"):
            sizes = re.findall(r"([\d.]+) (B|KiB|MiB)\b", line)
            total += float(sizes[1][0]) * units[sizes[1][1]]
    return total


@pytest.mark.parametrize("stage", STAGES)
def test_breakdown_and_memory_in_the_log(ranks: list[dict[str, Any]], stage: str) -> None:
    lines = ranks[0][stage]["lines"]
    times = [x for x in lines if "forward" in x and "backward" in x and "ms a step" in x]
    assert len(times) == STEPS // 2 and "waiting" in times[-1] and sum("this rank holds" in x for x in lines) == STEPS // 2
    assert not [x for x in ranks[1][stage]["lines"] if "ms a step" in x]


@pytest.mark.parametrize("stage", STAGES)
def test_operations_are_those_of_the_formulas(ranks: list[dict[str, Any]], folder: Path, stage: str) -> None:
    """Linear layers of 17 x 34 in 3 blocks, a head of 17 x 11, on 2 x 5 tokens, 2 micro-batches a step."""
    tokens, weights = 10 * ACCUMULATION, 3 * 2 * 17 * 34 + 17 * 11
    for got in (r[stage]["total"] for r in ranks):
        assert got["forward"] == 2 * tokens * weights and got["backward"] == 4 * tokens * weights
        assert got["parameters"] == 11 * 17 * 2 + 3 * (2 * 17 + 2 * 17 * 34 + 34 + 17)
    text = (folder / f"stage{stage}" / "flops.txt").read_text()
    assert re.search(r"^ +up +Linear +612 ", text, re.MULTILINE) and "MFU" in text and "flops_profiler.peak_tflops" in text
    assert ranks[0][stage]["mfu"] > 0


@pytest.mark.parametrize("stage", STAGES)
def test_traces_name_phases_and_buckets(ranks: list[dict[str, Any]], folder: Path, stage: str) -> None:
    for rank in (0, 1):
        trace = json.loads((folder / f"stage{stage}" / "trace" / f"rank-{rank}.json").read_text())
        names = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"}
        assert {"ze forward", "ze backward", "ze step"} <= names
        assert any(n.startswith("reduce_scatter grads: blocks.0") for n in names), "what moves, in the thread that moves it"
        assert any(n.startswith("wait ") for n in names)


def test_a_part_of_a_script_can_be_traced(ranks: list[dict[str, Any]]) -> None:
    for got in (r["profiled"] for r in ranks):
        assert "ze backward" in got["names"] and any(n.startswith("all_gather params: ") for n in got["names"])
        assert not got["left"]


@pytest.mark.parametrize("stage", STAGES)
def test_predicted_is_beside_measured(ranks: list[dict[str, Any]], stage: str) -> None:
    got = ranks[0][stage]
    report = got["report"]
    assert report == ranks[1][stage]["report"]
    memory = {row["kind"]: row for row in report["memory"]}
    for kind in ("parameters", "gradients", "optimizer"):
        assert memory[kind]["predicted"] == memory[kind]["measured"] == max(r[stage]["planned"][kind] for r in ranks)
    kept = next(row for row in report["peak"] if row["kind"] == "activations")
    assert kept["measured"] == max(kept["by_rank"]) > 2 * 10 * 17 * 4 and len(kept["by_rank"]) == 2
    assert memory["resident"]["measured"] > 2**20 and report["run"]["steps"] == STEPS
    rows = [row for row in report["traffic"] if row["predicted"]]
    assert sum(row["predicted"] for row in rows) == pytest.approx(got["planned traffic"], abs=4)
    if stage != "3":
        assert all(row["measured"] == row["predicted"] for row in rows), rows
    assert {row["dims"] for row in rows} == {"dp_shard"}


@pytest.mark.parametrize("stage", STAGES)
def test_phases_add_up_to_the_step(ranks: list[dict[str, Any]], folder: Path, stage: str) -> None:
    time = ranks[0][stage]["report"]["time"]
    assert [p["phase"] for p in time["phases"]] == ["compute", "exposed communication", "optimizer", "idle"]
    assert sum(p["measured"] for p in time["phases"]) == pytest.approx(time["step"]) and time["step"] > 0
    assert sum(p["share"] for p in time["phases"]) == pytest.approx(1.0)
    assert all(p["measured"] > 0 for p in time["phases"]), time
    _, records = read_run(folder / f"stage{stage}" / "run")
    for record in records:
        for step in record.steps:
            assert sum(step["split"].values()) == pytest.approx(step["wall"])
        line = record.timeline or {}
        phases = [(name, end - start) for lane, name, _, start, end in line["spans"] if lane == "phase"]
        assert [name for name, _ in phases] == ["forward", "backward"] * ACCUMULATION + ["step"] and line["number"] == 3
        assert sum(s for name, s in phases if name == "forward") == pytest.approx(record.steps[2]["phases"]["forward"], abs=5e-6)
        assert any(lane == "move" for lane, *_ in line["spans"]) and len(line["memory"]) >= 2 * len(phases)


@pytest.mark.parametrize("stage", STAGES)
def test_the_page_says_what_the_figures_say(ranks: list[dict[str, Any]], stage: str) -> None:
    for got in (r[stage] for r in ranks):
        assert not faults(got["page"], got["report"])


def test_the_check_of_the_page_sees_faults(ranks: list[dict[str, Any]]) -> None:
    page, document = ranks[0]["1"]["page"], ranks[0]["1"]["report"]
    shown = re.search(r'data-json="memory.0.measured" data-as="bytes">([^<]+)<', page)
    assert shown is not None
    assert faults(page.replace(shown[0], shown[0].replace(shown[1], "7 KiB")), document)
    assert faults(page.replace("<h2>Loss</h2>", "<h2>Loss 5</h2>"), document)
    assert faults(page.replace("</body>", '<script src="x.js"></script></body>'), document)
    assert faults(page.replace(">dp_shard<", ">dp_shart<"), document)


def test_the_command_makes_the_report_of_a_folder(folder: Path, ranks: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "stage2" / "run"
    assert report_command([str(run)]) == 0
    told = capsys.readouterr().out
    assert "Memory of the fullest rank" in told and "exposed communication" in told and "dp_shard" in told
    document = json.loads((run / "report.json").read_text())
    assert not faults((run / "report.html").read_text(), document)
    live = ranks[0]["2"]["report"]
    assert document["traffic"] == live["traffic"] and document["time"] == live["time"] and document["plots"] == live["plots"]


def test_records_of_a_run_that_failed(folder: Path, ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    """What was written is shown: a rank that never began, one that a crash cut short, one whose last line is half there."""
    whole = folder / "stage1" / "run"
    lines = (whole / "rank-00000.jsonl").read_text().splitlines()
    for name in ("run.json", "rank-00000.jsonl", "rank-00001.jsonl"):
        (tmp_path / name).write_text((whole / name).read_text())
    (tmp_path / "rank-00001.jsonl").write_text("")
    for kept in range(1, len(lines)):
        (tmp_path / "rank-00000.jsonl").write_text("\n".join([*lines[:kept], lines[kept][: len(lines[kept]) // 2]]))
        assert report_command([str(tmp_path)]) == 0
        document = json.loads((tmp_path / "report.json").read_text())
        assert not faults((tmp_path / "report.html").read_text(), document), kept
        assert document["run"]["steps"] == sum('"kind": "step"' in line for line in lines[:kept])
    with pytest.raises(ConfigError, match="cannot be written"):
        report_command([str(tmp_path), "--html", str(tmp_path / "nowhere" / "page.html")])
    (tmp_path / "rank-00000.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no rank has written"):
        report_command([str(tmp_path)])
    (tmp_path / "run.json").write_text('{"world": ')
    with pytest.raises(ConfigError, match="damaged"):
        report_command([str(tmp_path)])


def test_a_report_without_records_has_counters_and_layouts(ranks: list[dict[str, Any]]) -> None:
    got = ranks[0]["reset"]
    rows = [row for row in got["report"]["traffic"] if row["predicted"]]
    assert sum(row["measured"] for row in rows) == pytest.approx(got["planned"]) and got["report"]["time"]["step"] is None
    assert not got["report"]["plots"]


def test_a_run_that_goes_on_from_a_checkpoint_replaces_what_it_runs_again() -> None:
    start = {
        "kind": "start",
        "rank": 0,
        "number": 0,
        "predicted": {"memory": {}, "traffic": []},
        "streams": {},
        "place": {},
        "parameters": 5,
    }
    steps = [{"kind": "step", "number": n, "loss": float(n), "moved": [["params", "all_gather", 10, 1]]} for n in (1, 2, 3)]
    again = [{**start, "number": 2}, {"kind": "step", "number": 3, "loss": 9.0, "moved": [["params", "all_gather", 10, 1]]}]
    record = RankRecord.of([start, *steps, *again, {"kind": "step", "number": 4, "loss": None}])
    assert [s["number"] for s in record.steps] == [1, 2, 3, 4] and record.steps[2]["loss"] == 9.0
    assert record.moved["params", "all_gather"].sent == 40
    run = {"model": "M", "world": 1, "mesh": {}, "stage": 0, "dtype": "fp32", "device": "cpu", "batch": {"train": 1, "micro": 1}}
    document = json.loads(assemble(run, [record]).json())
    assert value_at(document, "plots.loss.values") == [1.0, 2.0, 9.0] and not faults(assemble(run, [record]).html(), document)


def test_predictions_of_a_plan_stand_beside_what_is_measured(folder: Path, ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    facts, records = read_run(folder / "stage1" / "run")
    (tmp_path / "plan.json").write_text(
        '{"time": {"compute": 0.25, "idle": 0}, "memory": {"activations": 4096, "optimizer": 5, "disk only": 7}}'
    )
    report = assemble({**facts, "plan": read_plan(str(tmp_path / "plan.json"))}, records)
    assert [p["predicted"] for p in report.document["time"]["phases"]] == [0.25, None, None, 0]
    memory = {row["kind"]: row for part in ("memory", "peak") for row in report.document[part]}
    assert memory["activations"]["predicted"] == 4096 and memory["disk only"]["predicted"] == 7 and not memory["disk only"]["by_rank"]
    assert memory["optimizer"]["predicted"] == memory["optimizer"]["measured"], "the layout knows better"
    assert not faults(report.html(), report.document) and "250 ms" in report.text()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"time": [1]}', '{"memory": {"a": "b"}}', '{"time": {"a": NaN}}', '{"traffic": {"first": {}}}', '{"others": [{}]}'],
)
def test_a_plan_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="monitor.plan"):
        read_plan(str(tmp_path / "plan.json"))


def test_a_plan_has_one_place() -> None:
    assert read_plan(None) == {} and read_plan(None, {"time": {"compute": 1}})["time"] == {"compute": 1}
    with pytest.raises(ConfigError, match="two places"):
        read_plan("plan.json", {})
    with pytest.raises(ConfigError, match="monitor.predicted"):
        read_plan(None, {"memory": 3})


def test_ranks_of_a_long_pipeline_that_the_plan_left_out() -> None:
    plan = {"traffic": {"0": {"a.b": 1.0}, "1": {"a.b": 2.0}, "4": {"a.b": 3.0}, "7": {"a.b": 4.0}}}
    assert [predicted_traffic(plan, place)["a.b"] for place in range(8)] == [1, 2, 2, 2, 3, 3, 3, 4]
    assert not predicted_traffic({}, 3)
