"""What plans say without any process: legality, the search, formulas, the command, the dry run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner import common
from tests.planner.formulas import BlockShape, block_activations
from zeroengine.config import Config
from zeroengine.errors import ConfigError
from zeroengine.launcher.cli import main
from zeroengine.planner.dryrun import build_rank
from zeroengine.planner.hardware import PRESETS, find_hardware, parse_memory
from zeroengine.planner.known import KnownIntegers
from zeroengine.planner.layouts import Choices, Job, Layout
from zeroengine.planner.model import find_model
from zeroengine.planner.passes import count_pass
from zeroengine.planner.plan import Plan, Planner, Refused
from zeroengine.planner.rehearsal import loss_of, rehearse
from zeroengine.planner.search import search
from zeroengine.planner.show import placement
from zeroengine.planner.stage import Shape, Workshop
from zeroengine.planner.time import is_inside


def gpt2(layers: int = 3) -> dict[str, object]:
    return {"n_layer": layers, "n_embd": 128, "n_head": 4, "vocab_size": 64, "n_positions": 256, "attn_pdrop": 0.0}


def test_sums_over_blocks_and_samples_are_those_of_the_whole_model() -> None:
    """A model is rehearsed by one and two blocks and samples, and here by all of them."""
    made = find_model("gpt2", gpt2(5))
    (rank,) = Workshop(made).ranks(Config.load({"train_micro_batch_size_per_gpu": 1}), 1, Shape())
    summed = rehearse([rank], made, 3, 64).passes[0].counted
    with made.fake:
        given = made.inputs(3, 64)
        with KnownIntegers():
            inputs = given.values()
            whole = count_pass(lambda: [loss_of(rank.module(**given, use_cache=False))], rank.module.parameters(), inputs, rank.fabric)
    for name in ("flops", "forward_flops", "saved"):
        assert getattr(summed, name) == pytest.approx(getattr(whole, name)), name
    assert summed.touched == pytest.approx(whole.touched, rel=0.01)
    assert summed.peak == pytest.approx(whole.peak, rel=0.01)
    assert summed.operations == pytest.approx(whole.operations, rel=0.02)


@pytest.mark.parametrize(("tp", "recompute"), [(1, False), (2, False), (1, True)])
def test_formula_of_korthikanti_is_near_what_a_block_keeps(tp: int, recompute: bool) -> None:
    settings = Config.load({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "mesh": {"tp": tp}})
    kept = []
    for layers in (2, 3):
        made = find_model("gpt2", gpt2(layers))
        ranks = Workshop(made).ranks(settings, tp, Shape(recompute=recompute))
        kept.append(rehearse(ranks, made, 2, 256).passes[0].counted.saved)
    shape = BlockShape(256, 2, 128, 4)
    # torch keeps the inner tensors of gelu_new and both inputs of residual sums, which the paper's block does not
    assert block_activations(shape, tp=tp, recompute=recompute) <= (kept[1] - kept[0]) * 1.05
    assert kept[1] - kept[0] <= 2.6 * block_activations(shape, tp=tp, recompute=recompute)


def test_formula_variants() -> None:
    shape = BlockShape(sequence=2048, micro=1, hidden=12288, heads=96)
    sbh = 2048 * 12288
    assert block_activations(shape, flash=False) == 34 * sbh + 5 * 96 * 2048**2
    assert block_activations(shape, tp=8, flash=False) == pytest.approx(sbh * (10 + 24 / 8) + 5 * 96 * 2048**2 / 8)
    assert block_activations(shape, tp=8, sequence_parallel=True) == pytest.approx(sbh * 34 / 8 + 4 * 96 * 2048 / 8)
    assert block_activations(shape, recompute=True) == 2 * sbh
    assert block_activations(shape, cp=4) == pytest.approx(block_activations(shape) / 4)


def test_the_engine_says_what_is_illegal() -> None:
    planner = Planner(common.source("llama"), common.job(6, 6))
    refused = planner.plan(Layout(tp=3, dp_shard=2))
    assert isinstance(refused, Refused)
    assert "mesh.tp 3" in refused.why_not
    experts = Planner(common.source("llama"), common.job(2, 2)).plan(Layout(dp_shard=2, ep=2))
    assert isinstance(experts, Refused)
    assert "no layers with experts" in experts.why_not


def test_search_ranks_what_fits_and_says_what_is_missing() -> None:
    hardware = replace(PRESETS["a100-80g"], reserved=0.0)
    job = Job(4, 300e3, common.SEQUENCE, 8, hardware, "bf16")
    choices = Choices(pp=(1,), tp=(1, 2), stages=(0, 3), micro=(1, 2), recompute=(False,), offload=("none", "cpu"))
    found = search(Planner(common.source("llama"), job), choices)
    times = [p.time.total for p in found.fitting]
    assert times == sorted(times)
    assert found.fitting
    assert found.too_large
    for plan in found.too_large:
        assert plan.fullest.memory.total > job.memory
        assert plan.why_not is not None
        assert "more than the" in plan.why_not


def test_the_state_is_that_of_the_optimizer_in_the_file() -> None:
    """In fp32 there are no masters: tensors of the parameters' size, and nothing else."""

    def state(kind: str, **params: object) -> float:
        job = replace(common.job(1, 1), base={"optimizer": {"type": kind, "params": params}})
        made = Planner(common.source("llama"), job).plan(Layout())
        assert isinstance(made, Plan)
        return made.fullest.memory.optimizer

    one = state("AdamW") / 2
    kept = {"Lion": 1, "Adagrad": 1, "Muon": 1, "SGD": 0, "Lamb": 2}
    assert {kind: state(kind) / one for kind in kept} == kept
    assert state("SGD", momentum=0.9) == one and state("Adam", amsgrad=True) == 3 * one


def test_pipelines_have_the_bubble_of_their_schedule() -> None:
    planner = Planner(common.source("llama"), common.job(2, 8))
    few, many = (planner.plan(Layout(pp=2, micro=m)) for m in (4, 1))
    assert isinstance(few, Plan)
    assert isinstance(many, Plan)
    assert 0 < many.time.bubble < few.time.bubble


def test_placement_names_what_sends_more_between_nodes() -> None:
    planner = Planner(common.source("llama"), common.job(2, 2))
    made = planner.plan(Layout(tp=2))
    assert isinstance(made, Plan)
    near = replace(common.cpu(), per_node=2)
    far = replace(near, per_node=1)
    assert is_inside(made.degrees, "tp", near)
    assert not is_inside(made.degrees, "tp", far)
    assert any("rule holds" in line for line in placement(made.traffic(), made.degrees, near))


def test_command_writes_a_configuration_that_the_engine_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "model", tmp_path / "config.json"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **gpt2()}))
    options = ["--gpus", "4", "--batch", "8", "--sequence", "64", "--tp", "1,2", "--pp", "1", "--micro-batch", "1", "--stage", "1,3"]
    assert main(["plan", "--model", str(folder), *options, "--write", str(out)]) == 0
    told = capsys.readouterr().out
    assert "placement" in told
    assert "fit" in told
    settings = Config.load(out)
    assert settings.data_parallel_size(4) >= 1
    assert main(["plan", "--model", str(folder), *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    config = json.loads(out.read_text())
    monitor = config.pop("monitor")
    assert facts["plans"][0]["config"] == config
    assert monitor["run_dir"] == "runs/config" and monitor["predicted"]["layout"] == facts["plans"][0]["layout"]


WRONG = {
    "--model is missing": ["--gpus", "4"],
    "no-such-model": ["--model", "no-such-model"],
    "'0' is not a whole number above 0": ["--model", "gpt2", "--gpus", "0"],
    "--tp: '0' is not a whole number above 0": ["--model", "gpt2", "--tp", "0,2"],
    "--micro-batch: 'a' is not a whole number above 0": ["--model", "gpt2", "--micro-batch", "a,2"],
    "'maybe' is none of no, yes": ["--model", "gpt2", "--recompute", "maybe"],
    "'4' is none of 0, 1, 2, 3": ["--model", "gpt2", "--stage", "4"],
    "did you mean `zb-h1`": ["--model", "gpt2", "--schedule", "zb-h"],
    "must divide the 3 ranks": ["--model", "gpt2", "--gpus", "3", "--tp", "2"],
    "positions for 1024": ["--model", "gpt2", "--sequence", "2048"],
    "is no size of memory": ["--model", "gpt2", "--gpu-memory", "many"],
    "neither a file": ["--model", "gpt2", "--hardware", "z9000"],
    "write python:package.module:factory": ["--model", "python:tests.planner.common:nothing"],
    "no causal language model of type t5": ["--model", "t5"],
    "takes no such configuration": ["--model", "gpt2", "--set", "n_layer=many"],
    "leave 2 layouts": [
        "--model",
        "gpt2",
        "--gpus",
        "1",
        "--pp",
        "1",
        "--micro-batch",
        "1",
        "--stage",
        "0",
        "--offload",
        "none",
        "--dry-run",
    ],
}


@pytest.mark.parametrize("why", WRONG)
def test_command_says_what_is_wrong(why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WRONG[why]]) == 2
    assert why in capsys.readouterr().err


def test_sizes_and_places() -> None:
    assert (parse_memory("80GB"), parse_memory("1GiB"), parse_memory("512")) == (80e9, 2**30, 512)
    for text in ("many", "-1GB", "infGB", "nan"):
        with pytest.raises(ConfigError, match="no size"):
            parse_memory(text)
    with pytest.raises(ConfigError, match="neither a file"):
        find_hardware("z9000")


FEW = ["--batch", "4", "--sequence", "4", "--dtype", "fp32", "--stage", "1", "--micro-batch", "1", "--offload", "none", "--tp", "1"]


@pytest.mark.parametrize(("factory", "fitting"), [("regression", ("one rank",)), ("staged", ("one rank", "pp 2"))])
def test_models_of_a_factory(factory: str, fitting: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Only one that takes stages has pipelines; one rank is enough."""
    name = {"regression": "Regression"}.get(factory, factory)
    shown = []
    for ranks in ("1", "2"):
        options = ["--gpus", ranks, "--pp", ranks, *FEW, "--recompute", "no"]
        code = main(["plan", "--model", f"python:tests.planner.common:{name}", *options, "--json"])
        plans = json.loads(capsys.readouterr().out)["plans"]
        assert (code == 0) == bool(plans)
        shown += [plan["layout"].split(";")[0] for plan in plans]
    assert tuple(shown) == fitting


@pytest.mark.parametrize(
    ("factory", "why"), [("Branches", "looks at values of its tensors"), ("Other", "cannot be rehearsed"), ("Broken", "makes no model")]
)
def test_models_that_cannot_be_planned_are_refused_with_the_reason(factory: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "1", "--recompute", "no", *FEW]
    assert main(["plan", "--model", f"python:tests.planner.common:{factory}", *options]) == 1
    assert why in capsys.readouterr().out


def test_no_memory_is_enough_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "python:tests.planner.common:Regression", "--gpus", "1", *FEW, "--gpu-memory", "1B"]) == 1
    told = capsys.readouterr().out
    assert "0 fit" in told and "more than the 1 B there are; most of it is reserved" in told


@pytest.mark.ranks
def test_a_measured_machine_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "machine.json"
    assert main(["plan", "--measure", str(machine), "--gpus", "2", "--nvme-path", str(tmp_path)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["machine.json"]
    found = find_hardware(str(machine))
    for rate in ("flops", "flops32", "memory_rate", "host_rate", "inside", "link_rate", "disk_rate", "operation", "latency_inside"):
        assert 0 < getattr(found, rate) < float("inf"), rate
    assert (found.device, found.per_node, found.memory > 1e6) == ("cpu", 2, True)
    options = ["--gpus", "2", "--pp", "1", *FEW, "--recompute", "no", "--hardware", str(machine)]
    assert main(["plan", "--model", "python:tests.planner.common:Regression", *options]) == 0
    assert found.source in capsys.readouterr().out


def test_hardware_is_kept_as_json(tmp_path: Path) -> None:
    PRESETS["h100-80g"].save(tmp_path / "hardware.json")
    assert find_hardware(str(tmp_path / "hardware.json")) == PRESETS["h100-80g"]


SCALED = {  # the layouts of docs/scale.md, of small models on few ranks: options, memory, what is said, exit code
    "dense": (
        ["gpt2", *(f"--set={k}={v}" for k, v in {**gpt2(8), "n_head": 8, "vocab_size": 96}.items()), "--gpus", "1024", "--batch", "128"],
        ["--tp", "8", "--pp", "4", "--stage", "1"], "80GB", "pp 4 x dp_shard 32 x tp 8", 0,
    ),
    "experts": (
        ["mixtral", "--set=num_hidden_layers=4", "--set=hidden_size=32", "--set=intermediate_size=48", "--set=num_attention_heads=4",
         "--set=num_key_value_heads=4", "--set=num_local_experts=16", "--set=vocab_size=96", "--gpus", "128", "--batch", "128"],
        ["--tp", "1", "--pp", "4", "--cp", "2", "--ep", "16", "--stage", "2"], "80GB", "pp 4 x dp_shard 16 x cp 2; ep 16", 0,
    ),
    "too large": (
        ["gpt2", *(f"--set={k}={v}" for k, v in gpt2(4).items()), "--gpus", "8", "--batch", "8"],
        ["--tp", "2", "--pp", "2", "--stage", "1"], "700000", "does NOT fit", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_dry_runs_build_every_pipeline_rank_of_large_jobs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, layout, memory, said, code = SCALED[name]
    options = ["--sequence", "32", "--micro-batch", "1", "--recompute", "no", "--offload", "none", "--gpu-memory", memory, "--dry-run"]
    assert main(["plan", "--model", *model, *layout, *options]) == code
    told = capsys.readouterr().out
    stages = int(layout[layout.index("--pp") + 1])
    assert said in told and all(f"pipeline rank {place} (rank " in told for place in range(stages)) and "buckets" in told
    assert "activations" in told and "placement" in told


def test_dry_run_finds_the_states_that_the_plan_has() -> None:
    """Two ways to one figure: buckets built by the engine's start, and laid out on paper."""
    source, hardware = common.source("mixtral"), replace(common.cpu(), reserved=0.0)
    job = Job(8, 80e9, common.SEQUENCE, 8, hardware, "bf16")
    layout = Layout(pp=2, dp_shard=4, ep=2, stage=2, micro=1)
    plan = Planner(source, job).plan(layout)
    assert isinstance(plan, Plan), plan.why_not
    for rank in plan.ranks:
        built = build_rank(source, job, layout, rank.place).memory
        assert {k: built[k] for k in ("parameters", "gradients", "optimizer")} == {
            k: rank.memory.kinds()[k] for k in ("parameters", "gradients", "optimizer")
        }
