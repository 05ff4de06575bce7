"""Layers and sequences that ranks share inside the stages of a pipeline, against one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.parallel.hf_models import build
from tests.pipeline.listed import (
    BATCH,
    MICRO,
    STEPS,
    VOCABULARY,
    Attention,
    Block,
    Result,
    batch,
    compare,
    count,
    cross_entropy,
    data,
    listed,
    listed_batch,
    reference,
    run,
    settings,
)  # fmt: skip
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, DivergenceError, ModelError
from zeroengine.pipeline.layers import LayerSpec
from zeroengine.pipeline.module import PipelineModule

pytest.importorskip("transformers")


Case = dict[str, Any]


def case(kind: str, stage: int, schedule: str = "1f1b", chunks: int | None = None, recompute: bool = False, **changes: Any) -> Case:
    mesh = {"pp": 2, **changes.pop("mesh", {})}
    return {
        "kind": kind, "schedule": schedule, "chunks": chunks, "recompute": recompute, "config": settings(stage, mesh=mesh, **changes)
    }  # fmt: skip


TP, CP = {"tp": 2}, {"cp": 2}
SP, PARTS = {"sequence_parallel": True}, {"loss_parallel": True}
FOUR: dict[str, Case] = {
    "llama tp": case("llama", 1, mesh=TP),
    "llama tp, given whole": case("llama", 1, "", mesh={**TP, "pp_schedule": "zb-h1"}),
    "llama tp+sp, ZeRO 3": case("llama", 3, "zb-h1", mesh=TP, tensor_parallel=SP),
    "llama tp+sp, recomputed": case("llama", 2, recompute=True, mesh=TP, tensor_parallel={**SP, **PARTS}),
    "qwen (tied) tp, parts of the loss": case("qwen", 1, "gpipe", mesh=TP, tensor_parallel=PARTS),
    "qwen (tied) tp+sp": case("qwen", 0, mesh=TP, tensor_parallel=SP),
    "gpt2 tp+sp, two stages a rank": case("gpt2x4", 1, "interleaved", 2, mesh=TP, tensor_parallel=SP),
    "llama ulysses": case("llama", 1, mesh=CP, sequence_parallel={"attention": "ulysses"}),
    "qwen ring, ZeRO 3": case("qwen", 3, mesh=CP, sequence_parallel={"attention": "ring"}),
    "gpt2 ring, recomputed": case("gpt2x4", 2, "zb-v", recompute=True, mesh=CP, sequence_parallel={"attention": "ring"}),
    "gemma (window) ulysses": case("gemma", 1, mesh=CP),
    "qwen (tied) tp, dualpipe-v": case("qwen4", 1, "dualpipe-v", mesh=TP, gradient_accumulation_steps=4),
    "qwen (tied) ring, dualpipe-v": case(
        "qwen4", 2, "dualpipe-v", mesh=CP, sequence_parallel={"attention": "ring"}, gradient_accumulation_steps=5
    ),
    "list tp+sp, dualpipe-v, recomputed": case(
        "list", 3, "dualpipe-v", recompute=True, mesh=TP, tensor_parallel=SP, gradient_accumulation_steps=4
    ),
    "list tp": case("list", 1, mesh=TP),
    "list tp+sp, two stages a rank": case("list", 2, "interleaved", 2, mesh=TP, tensor_parallel=SP),
    "list ring, recomputed": case("list", 3, recompute=True, mesh=CP, sequence_parallel={"attention": "ring"}),
}


def model_of(case: Case) -> nn.Module:
    from zeroengine.pipe import split_causal_lm

    pp, recompute = case["config"]["mesh"]["pp"], case["recompute"]
    if case["kind"] == "list":
        more = {"activation_checkpoint_interval": 2} if recompute else {}
        return listed(pp, schedule=case["schedule"], virtual_stages=case["chunks"], **more)
    model: Any = build(case["kind"])
    if recompute:
        model.gradient_checkpointing_enable()
    return split_causal_lm(model, pp, schedule=case["schedule"], virtual_stages=case["chunks"]) if case["schedule"] else model


def _train(cases: dict[str, Case]) -> dict[str, Result]:
    found = {}
    for label, one in cases.items():
        torch.manual_seed(0)
        model = model_of(one)
        given = None if one["schedule"] else [{"params": model.named_parameters()}]  # of the whole model
        engine, *_ = zeroengine.initialize(model=model, model_parameters=given, config=one["config"])
        found[label] = run(engine, one["kind"])
    return found


def _everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All that four ranks do, in one launch."""
    zeroengine.init_distributed(verbose=False)
    degrees = [(SAVED, True), *((config, False) for config in OTHERS)]
    return {"train": _train(FOUR), "bytes": _counted(rank), "dropout": _dropping(rank), "resumed": _resumed(folder, degrees)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def four(folder: str) -> list[dict[str, Any]]:
    return run_ranks(_everything, 4, folder, timeout=280)


def want(kind: str, micros: int = MICRO) -> Result:
    if kind == "list":
        model: Any = listed(1)
        return reference(model, 1, model, micros=micros)
    model = build(kind)
    return reference(model, 1, lambda ids: model(input_ids=ids, use_cache=False).logits, micros=micros)


@pytest.mark.parametrize("label", FOUR)
def test_two_stages_of_two_ranks_follow_one_process(four: list[dict[str, Any]], label: str) -> None:
    made = FOUR[label]
    compare([found["train"][label] for found in four], want(made["kind"], made["config"]["gradient_accumulation_steps"]))


# --- bytes, random numbers ------------------------------------------------------------------------------------------------

TOKENS = 16


def _counted(rank: int) -> dict[str, Any]:
    """Bytes of the second step, by kind of sharing; lengths do not change."""
    found = {}
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    kinds: dict[str, Any] = {
        "tp": {"mesh": TP}, "tp+sp": {"mesh": TP, "tensor_parallel": SP},
        "ring": {"mesh": CP, "sequence_parallel": {"attention": "ring"}},
    }  # fmt: skip
    for label, more in kinds.items():
        engine, *_ = zeroengine.initialize(model=model_of(case("llama", 1, **more)), config=case("llama", 1, **more)["config"])
        counted = (engine.mesh.tensor, engine._comms.stream)
        for _ in range(2):
            for comm in counted:
                comm.traffic.reset()
            engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * MICRO))
        found[label] = [dict(comm.traffic.bytes) for comm in counted]
        engine.destroy()
    return found


def test_bytes_of_layers_and_messages(four: list[dict[str, Any]]) -> None:
    """A rank has one block. A split or shared sequence crosses the border of stages in parts."""
    results = [found["bytes"] for found in four]
    hidden = BATCH * TOKENS * 32 * 4
    trailer = 16
    for rank, found in enumerate(results):
        for label, parts in (("tp", 1), ("tp+sp", 2), ("ring", 2)):
            activations = hidden // parts
            positions = (BATCH * TOKENS // 2 * 8) * (label == "ring" and rank < 2)  # go on to the stages behind
            assert found[label][1]["send"] == MICRO * (activations + positions + trailer), (rank, label, found[label][1])
        # 2 + 2 all-reduces of a block; one more where tokens are looked up, or where the head's gradient comes together
        assert found["tp"][0]["all_reduce"] == MICRO * 5 * hidden, (rank, found["tp"][0])
        moved = found["tp+sp"][0]
        assert moved["reduce_scatter"] + moved["all_gather"] >= MICRO * 4 * hidden


def _dropping(rank: int) -> dict[str, Any]:
    """Masks are common where ranks hold the same, and each rank's own where they do not: what is whole stays equal."""
    import transformers

    found: dict[str, Any] = {}
    for label, more, again in (("tp", {}, False), ("tp+sp", SP, False), ("tp+sp again", SP, True)):
        torch.manual_seed(7)
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0.3, attn_pdrop=0.3)
        )
        if again:
            model.gradient_checkpointing_enable()
        torch.manual_seed(rank)
        config = settings(1, mesh={"pp": 2, **TP}, tensor_parallel={"sequence_parallel": False, **more})
        engine, *_ = zeroengine.initialize(model=model, config=config)
        losses = [float(engine.train_batch(data(engine, "gpt2", step))) for step in range(2)]
        engine.check_replicas()
        evals = [float(engine.eval_batch(data(engine, "gpt2", 9), MICRO)) for _ in range(2)]
        found[label] = losses, evals, float(torch.rand(()))
        engine.destroy()
        seeded = [
            {"schedule": "zb-h1" if again else "1f1b", "activation_checkpoint_interval": 2 * again, "dropout": 0.3, "dropout_seed": 5},
        ]
        for options in seeded:
            engine, *_ = zeroengine.initialize(model=listed(2, **options), config=config)
            found[f"list {label}"] = [float(engine.train_batch(data(engine, "list", step))) for step in range(STEPS)]
            engine.destroy()
    return found


def test_dropout_in_tensor_ranks(four: list[dict[str, Any]]) -> None:
    """The same numbers on all ranks, in evaluation as well, and again where blocks are computed again."""
    results = [found["dropout"] for found in four]
    plain = want("list")[0]
    for found in results:
        for label in ("tp", "tp+sp", "tp+sp again"):
            assert found[label][:2] == results[0][label][:2] and found[label][1][0] == found[label][1][1]
            assert found[f"list {label}"] == results[0][f"list {label}"] and found[f"list {label}"][0] != pytest.approx(plain[0], rel=1e-4)
        assert found["tp+sp"][0] == pytest.approx(found["tp+sp again"][0], rel=1e-5)
        assert found["list tp+sp"] == pytest.approx(found["list tp+sp again"], rel=1e-5)
    for label in ("tp", "tp+sp", "tp+sp again"):  # ranks of one tensor group go on from the same state
        drawn = [r[label][2] for r in results]
        assert drawn[0] == drawn[1] and drawn[2] == drawn[3]


# --- checkpoints at another degree ----------------------------------------------------------------------------------------


SAVED = settings(1, mesh={"pp": 2, **TP})
OTHERS = (settings(3, mesh={"pp": 2, **CP}), settings(0, mesh={"pp": 2, **TP}, tensor_parallel=SP), settings(2, mesh={"pp": 4}))


def _resumed(folder: str, degrees: list[tuple[dict[str, Any], bool]]) -> list[list[float]]:
    """For each configuration a step, unless one is loaded, and two more; the first (`True`) is saved in between."""
    found = []
    for config, saves in degrees:
        engine, *_ = zeroengine.initialize(model=build("qwen4"), config=config)
        if saves:
            engine.train_batch(data(engine, "qwen", 0))
            engine.save_checkpoint(folder)
        else:
            _spoil(engine)
            engine.load_checkpoint(folder)
        found.append([float(engine.train_batch(data(engine, "qwen", step))) for step in (1, 2)])
        engine.destroy()
    return found


def _spoil(engine: Any) -> None:
    """What is loaded counts."""
    if engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            for p in engine.module.parameters():
                p.mul_(0.5)


def _alone(rank: int, world: int, folder: str) -> list[float]:
    """The model that is not cut; every micro-batch has the same number of tokens here, as its loss weighs them alike."""
    zeroengine.init_distributed(verbose=False)
    engine, *_ = zeroengine.initialize(model=build("qwen4"), config=settings(2))
    _spoil(engine)
    engine.load_checkpoint(folder)
    with torch.no_grad():
        made = [batch(1, micro, 0) for micro in range(MICRO)]
        sums = [float(engine(**given).loss) * count(given["labels"][:, 1:]) for given in made]
    return [sum(sums) / sum(count(given["labels"][:, 1:]) for given in made)]


def test_a_checkpoint_loads_at_other_degrees(four: list[dict[str, Any]], folder: str) -> None:
    """Saved by 2 stages x 2 ranks that share layers, whole tensors under the model's names."""
    losses = want("qwen4")[0][1:]
    for found in four:
        for got in found["resumed"]:
            assert got == pytest.approx(losses, rel=2e-5)
    assert run_ranks(_alone, 1, folder, timeout=60)[0] == pytest.approx(losses[:1], rel=2e-5)


# --- what is refused --------------------------------------------------------------------------------------------------------


class Odd(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)


def _refused(rank: int, world: int) -> list[str]:
    zeroengine.init_distributed(verbose=False)
    muon = {"type": "Muon", "params": {"lr": 0.1}}
    plain = [LayerSpec(nn.Embedding, VOCABULARY, 16), LayerSpec(nn.Linear, 16, 16), LayerSpec(nn.Linear, 16, VOCABULARY)]
    odd = [LayerSpec(Block), LayerSpec(Odd)]  # of which the second stage alone knows

    def module(layers: list[Any], **options: Any) -> PipelineModule:
        return PipelineModule(layers, 2, cross_entropy, partition_method="uniform", **options)

    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (listed(2), {"mesh": TP, "optimizer": muon}),
        (module(odd), {"mesh": TP}),
        (module(plain), {"mesh": TP}),
        (listed(2), {"mesh": TP, "tensor_parallel": PARTS}),
        (module(plain), {"mesh": CP}),
        (module(plain, loss_weight=count), {"mesh": CP}),
        (nn.Linear(4, 4), {"mesh": {"pp": 2}}),
        (build("llama"), {"mesh": {"pp": 2, **TP}}),
    ]
    said = []
    for model, more in cases:
        config = settings(1, **{**more, "mesh": {"pp": 2, **more["mesh"]}, "health": {"comm_timeout": 10}})
        with pytest.raises((ConfigError, ModelError, DivergenceError)) as refused:
            engine, *_ = zeroengine.initialize(model=model, config=config)
            group = rank if model is cases[-1][0] else 0  # another batch on each rank
            make = listed_batch if isinstance(model, PipelineModule) else batch
            engine.train_batch(iter([make(0, i, group) for i in range(MICRO)]))
        said.append(str(refused.value))
    return said


REASONS = (
    "looks at whole parameters", "the roles of .* are not clear", "no stage has an attention", "loss_parallel: PipelineModule has no",
    "loss_weight", "no layer of any stage called", "neither a zeroengine.pipe.PipelineModule of 2 stages nor",
    "must be given the same batch",
)  # fmt: skip


def test_what_is_refused_is_refused_on_all_ranks() -> None:
    outcomes = run_ranks(_refused, 4, timeout=90, failures=True)
    for rank, outcome in enumerate(outcomes[:2]):
        assert outcome.value is not None, outcome.error
        for told, reason in zip(outcome.value, REASONS, strict=True):
            assert re.search(reason, told), (rank, reason, told)
    # the last stage hears of unlike batches of the first one from ranks that have gone
    assert all(o.value is not None or "share layers or a sequence" in o.error or "rank" in o.error for o in outcomes)
