"""Layers and sequences that ranks share inside the stages of a pipeline, against one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroengine
from tests.parallel.hf_models import build
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, DivergenceError, ModelError
from zeroengine.pipeline.layers import LayerSpec, TiedLayerSpec
from zeroengine.pipeline.module import PipelineModule
from zeroengine.sequence.shared import shared_attention, token_positions

pytest.importorskip("transformers")

STEPS, MICRO, BATCH, VOCABULARY = 3, 2, 2, 64
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5}}


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "bucket_size": 3000, "stage3_param_persistence_threshold": 0, **changes.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": MICRO, "optimizer": OPTIMIZER,
        "gradient_clipping": 0.5, "zero_optimization": zero, "steps_per_print": None, "health": {"comm_timeout": 30}, **changes,
    }  # fmt: skip


# --- a model as a list of layers ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(shared_attention(self, q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.dropout = Attention(), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before(x)))
        return x + self.mlp(self.between(x))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.places(token_positions(self, x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(16), nn.Embedding(VOCABULARY, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.tokens.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def count(targets: Tensor) -> int:
    return int((targets != -100).sum())


def listed(stages: int, **options: Any) -> PipelineModule:
    dropout = options.pop("dropout", 0.0)
    tie = {"tied_weight_attr": "tokens.weight"}
    layers = [TiedLayerSpec("t", Embedding, **tie), *[LayerSpec(Block, dropout) for _ in range(4)], TiedLayerSpec("t", Head, **tie)]
    return PipelineModule(layers, stages, cross_entropy, partition_method="uniform", loss_weight=count, **options)


def listed_batch(step: int, micro: int, group: int) -> tuple[Tensor, Tensor]:
    given = batch(step, micro, group)
    return given["input_ids"], F.pad(given["labels"], (0, 1), value=-100)[:, 1:]


def batch(step: int, micro: int, group: int) -> dict[str, Tensor]:
    """Lengths differ and divide nothing; not as many targets in each."""
    generator = torch.Generator().manual_seed(100 * step + 10 * group + micro)
    ids = torch.randint(0, VOCABULARY, (BATCH, 13 + 4 * micro), generator=generator)
    labels = ids.clone()
    labels[0, : 3 + 2 * group + micro] = -100
    return {"input_ids": ids, "labels": labels}


# --- one process and the cases --------------------------------------------------------------------------------------------


Result = tuple[list[float], list[float], dict[str, Tensor] | None]


def reference(kind: str, groups: int) -> Result:
    model: Any = listed(1) if kind == "list" else build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses, norms = [], []
    for step in range(STEPS):
        parts, counts = [], []
        for group in range(groups):
            for micro in range(MICRO):
                if kind == "list":
                    x, y = listed_batch(step, micro, group)
                    logits = model(x)
                else:
                    given = batch(step, micro, group)
                    y = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
                    logits = model(input_ids=given["input_ids"], use_cache=False).logits
                parts.append(F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"))
                counts.append(count(y))
        loss = torch.stack(parts).sum() / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: v.detach().clone() for n, v in model.state_dict().items()}


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
    "llama tp, given whole": case("llama", 1, "", mesh=TP),
    "llama tp+sp, ZeRO 3": case("llama", 3, "zb-h1", mesh=TP, tensor_parallel=SP),
    "llama tp+sp, recomputed": case("llama", 2, recompute=True, mesh=TP, tensor_parallel={**SP, **PARTS}),
    "qwen (tied) tp, parts of the loss": case("qwen", 1, "gpipe", mesh=TP, tensor_parallel=PARTS),
    "qwen (tied) tp+sp": case("qwen", 0, mesh=TP, tensor_parallel=SP),
    "gpt2 tp+sp, two stages a rank": case("gpt2x4", 1, "interleaved", 2, mesh=TP, tensor_parallel=SP),
    "llama ulysses": case("llama", 1, mesh=CP, sequence_parallel={"attention": "ulysses"}),
    "qwen ring, ZeRO 3": case("qwen", 3, mesh=CP, sequence_parallel={"attention": "ring"}),
    "gpt2 ring, recomputed": case("gpt2x4", 2, "zb-v", recompute=True, mesh=CP, sequence_parallel={"attention": "ring"}),
    "gemma (window) ulysses": case("gemma", 1, mesh=CP),
    "list tp": case("list", 1, mesh=TP),
    "list tp+sp, two stages a rank": case("list", 2, "interleaved", 2, mesh=TP, tensor_parallel=SP),
    "list ring, recomputed": case("list", 3, recompute=True, mesh=CP, sequence_parallel={"attention": "ring"}),
}
EIGHT: dict[str, Case] = {
    "llama pp2 tp2 dp2, ZeRO 1": case("llama", 1, mesh=TP, tensor_parallel=SP),
    "qwen pp2 tp2 cp2, ZeRO 1": case("qwen", 1, mesh={**TP, **CP}, sequence_parallel={"attention": "ring"}),
    "list pp2 cp2 dp2, ZeRO 2": case("list", 2, mesh=CP),
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


def data(engine: Any, kind: str, step: int) -> Any:
    make = listed_batch if kind == "list" else batch
    return iter([make(step, i, engine.mesh.sample_group) for i in range(MICRO)])


def _train(rank: int, world: int, cases: dict[str, Case]) -> dict[str, Result]:
    zeroengine.init_distributed(verbose=False)
    found = {}
    for label, one in cases.items():
        torch.manual_seed(0)
        model = model_of(one)
        given = None if one["schedule"] else [{"params": model.named_parameters()}]  # of the whole model
        engine, *_ = zeroengine.initialize(model=model, model_parameters=given, config=one["config"])
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(float(engine.train_batch(data(engine, one["kind"], step))))
            norms.append(engine.get_global_grad_norm())
        engine.check_replicas()
        found[label] = losses, norms, engine.full_state_dict()
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, Result]]:
    return run_ranks(_train, 4, FOUR, timeout=280)


@pytest.fixture(scope="module")
def eight() -> list[dict[str, Result]]:
    return run_ranks(_train, 8, EIGHT, timeout=280)


def compare(results: list[dict[str, Result]], label: str, kind: str, groups: int) -> None:
    losses, norms, weights = reference(kind, groups)
    assert weights is not None
    for rank, found in enumerate(results):
        got_losses, got_norms, got = found[label]
        assert got_losses == pytest.approx(losses, rel=1e-5), rank
        assert got_norms == pytest.approx(norms, rel=1e-4), rank
        assert (got is None) == (rank > 0)
    got = results[0][label][2]
    assert got is not None and set(got) == set(weights)
    for name, value in weights.items():
        assert torch.allclose(got[name], value, rtol=1e-4, atol=2e-5), (name, float((got[name] - value).abs().max()))


@pytest.mark.parametrize("label", FOUR)
def test_two_stages_of_two_ranks_follow_one_process(four: list[dict[str, Result]], label: str) -> None:
    compare(four, label, FOUR[label]["kind"], 1)


@pytest.mark.parametrize("label", EIGHT)
def test_three_dimensions_follow_one_process(eight: list[dict[str, Result]], label: str) -> None:
    compare(eight, label, EIGHT[label]["kind"], 1 if "cp2, " in label and "tp2" in label else 2)


# --- bytes, random numbers ------------------------------------------------------------------------------------------------

TOKENS = 16


def _counted(rank: int, world: int) -> dict[str, Any]:
    """Bytes of the second step, by kind of sharing; lengths do not change."""
    zeroengine.init_distributed(verbose=False)
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


def test_bytes_of_layers_and_messages() -> None:
    """A rank has one block. A split or shared sequence crosses the border of stages in parts."""
    results = run_ranks(_counted, 4, timeout=120)
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


def _dropping(rank: int, world: int) -> dict[str, Any]:
    """Masks are common where ranks hold the same, and each rank's own where they do not: what is whole stays equal."""
    zeroengine.init_distributed(verbose=False)
    import transformers

    found: dict[str, Any] = {}
    for label, more in (("tp", {}), ("tp+sp", SP)):
        torch.manual_seed(7)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0.3, attn_pdrop=0.3)
        )
        torch.manual_seed(rank)
        config = settings(1, mesh={"pp": 2, **TP}, tensor_parallel={"sequence_parallel": False, **more})
        engine, *_ = zeroengine.initialize(model=model, config=config)
        losses = [float(engine.train_batch(data(engine, "gpt2", step))) for step in range(2)]
        engine.check_replicas()
        evals = [float(engine.eval_batch(data(engine, "gpt2", 9), MICRO)) for _ in range(2)]
        found[label] = losses, evals, float(torch.rand(()))
        engine.destroy()
    engine, *_ = zeroengine.initialize(model=listed(2, dropout=0.3, dropout_seed=5), config=settings(1, mesh={"pp": 2, **TP}))
    found["list"] = [float(engine.train_batch(data(engine, "list", step))) for step in range(STEPS)]
    engine.destroy()
    return found


def test_dropout_in_tensor_ranks() -> None:
    results = run_ranks(_dropping, 4, timeout=120)
    model = listed(1, dropout=0.3, dropout_seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for step in range(STEPS):
        model.draw = step
        pairs = [listed_batch(step, micro, 0) for micro in range(MICRO)]
        parts = [F.cross_entropy(model(x, micro=i).flatten(0, 1), y.flatten(), reduction="sum") for i, (x, y) in enumerate(pairs)]
        loss = torch.stack(parts).sum() / sum(count(y) for _, y in pairs)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    for found in results:
        assert found["list"] == pytest.approx(losses, rel=1e-5)
        for label in ("tp", "tp+sp"):
            assert found[label][:2] == results[0][label][:2] and found[label][1][0] == found[label][1][1]
    for label in ("tp", "tp+sp"):  # ranks of one tensor group go on from the same state
        drawn = [r[label][2] for r in results]
        assert drawn[0] == drawn[1] and drawn[2] == drawn[3]


# --- checkpoints at another degree ----------------------------------------------------------------------------------------


def _resumed(rank: int, world: int, folder: str, degrees: list[tuple[dict[str, Any], bool]]) -> list[list[float]]:
    """For each configuration a step, unless one is loaded, and two more; the first (`True`) is saved in between."""
    zeroengine.init_distributed(verbose=False)
    found = []
    for config, saves in degrees:
        engine, *_ = zeroengine.initialize(model=build("qwen"), config=config)
        pipeline = hasattr(engine, "last_run")
        if saves:
            engine.train_batch(data(engine, "qwen", 0))
            engine.save_checkpoint(folder)
        else:
            with torch.no_grad():
                if config["zero_optimization"]["stage"] < 3:
                    for p in engine.module.parameters():
                        p.mul_(0.5)  # what is loaded counts
            engine.load_checkpoint(folder)
        losses = []
        for step in (1, 2):
            if pipeline:
                losses.append(float(engine.train_batch(data(engine, "qwen", step))))
                continue
            parts = []
            for given in data(engine, "qwen", step):
                loss = engine(**given).loss
                engine.backward(loss)
                engine.step()
                parts.append(float(loss.detach()))
            losses.append(sum(parts) / MICRO)
        found.append(losses)
        engine.destroy()
    return found


def test_a_checkpoint_loads_at_other_degrees(tmp_path: Path) -> None:
    """Saved by 2 stages x 2 ranks that share layers, whole tensors under the model's names. Without stages every micro-batch
    counts alike, so that loss is only near."""
    saved = settings(1, mesh={"pp": 2, **TP})
    others = [settings(3, mesh={"pp": 2, **CP}), settings(2, mesh={"pp": 2}), settings(0, mesh={"pp": 2, **TP}, tensor_parallel=SP)]
    results = run_ranks(_resumed, 4, str(tmp_path), [(saved, True), *((o, False) for o in (others[0], others[2]))], timeout=150)
    want = reference("qwen", 1)[0][1:]
    for found in results:
        for losses in found:
            assert losses == pytest.approx(want, rel=2e-5)
    assert run_ranks(_resumed, 2, str(tmp_path), [(others[1], False)], timeout=60)[1][0] == pytest.approx(want, rel=2e-5)
    alone = run_ranks(_resumed, 1, str(tmp_path), [(settings(3), False)], timeout=60)[0][0]
    assert alone == pytest.approx(want, rel=2e-2)


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
        config = settings(1, **{**more, "mesh": {"pp": 2, **more["mesh"]}})
        with pytest.raises((ConfigError, ModelError, DivergenceError)) as refused:
            engine, *_ = zeroengine.initialize(model=model, config=config)
            group = rank if model is cases[-1][0] else 0  # another batch on each rank
            make = listed_batch if isinstance(model, PipelineModule) else batch
            engine.train_batch(iter([make(0, i, group) for i in range(MICRO)]))
        said.append(str(refused.value))
    return said


REASONS = (
    "looks at whole parameters", "the roles of .* are not clear", "no stage has an attention", "loss_parallel: .* splits no layers",
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
