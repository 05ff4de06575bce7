"""What cannot be combined, each with the words in which it is refused."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tests.composition import models, space, train
from tests.composition.cover import Row

PLAIN: Row = {name: levels[0] for name, levels in space.FACTORS.items()}


@dataclass(frozen=True)
class Case:
    """`row` changes a plain combination, `config` the configuration made from it; `reason` and `remedy` are in the message.
    `model`: made instead of that of the row."""

    reason: str
    remedy: str
    row: Row = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] | None = None

    @property
    def ranks(self) -> int:
        return int(self.row.get("ranks", 2))


@dataclass(frozen=True)
class Refused:
    """What happened on one rank: the error, what the process held before and after, and whether the model was usable again."""

    kind: str
    text: str
    before: dict[str, int]
    after: dict[str, int]
    again: str = ""


def _heads() -> nn.Module:
    import transformers as hf

    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=61, n_embd=12, n_layer=2, n_head=3, n_positions=32))


def _experts() -> nn.Module:
    import transformers as hf

    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=64,
            hidden_size=24,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=3,
            num_experts_per_tok=2,
        )  # fmt: skip
    )


def _dropout() -> nn.Module:
    import transformers as hf

    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=61, n_embd=12, n_layer=2, n_head=2, n_positions=32, attn_pdrop=0.1))


def _router_loss() -> nn.Module:
    from zeroengine.pipe import split_causal_lm

    return split_causal_lm(models.build("moe aux"), 2)


def _own() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _two_stages() -> nn.Module:
    from zeroengine.pipe import split_causal_lm

    return split_causal_lm(models.build("gpt"), 2)


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}
CASES = {
    "degrees": Case("tp 3 = 3 does not divide 2 ranks", "change a degree or the number of ranks", config={"mesh": {"tp": 3}}),
    "shard groups": Case("mesh.dp_shard 3 = 3 does not divide the 2 ranks", "change a degree", config={"mesh": {"dp_shard": 3}}),
    "shard groups of MiCS": Case("zero_optimization.mics_shard_size 3 = 3 does not divide", "change a degree", config={
        "zero_optimization": {"stage": 3, "mics_shard_size": 3}}),
    "replicas": Case("dp_replicate 2 x dp_shard 2 = 4 ranks, but the job has 2", "leave dp_shard at -1", config={
        "mesh": {"dp_replicate": 2, "dp_shard": 2}}),
    "other stages than the mesh": Case("mesh.pp is 4, but the model has 2", "num_stages of the same number", config={
        "mesh": {"pp": 4}}, model=_two_stages),
    "experts of a model without": Case("GPT2LMHeadModel has no layers with experts", "set mesh.ep to 1", {"experts": 2}),
    "experts over too many ranks": Case("mesh.ep 4 does not divide the 2 ranks that share one state", "give a divisor", {
        "ranks": 4, "model": "moe", "replicas": 2}, {"mesh": {"dp_replicate": 2, "ep": 4}}),
    "experts that do not divide": Case("mesh.ep 2 does not divide the 3 experts", "give a divisor", {"experts": 2}, model=_experts),
    "sequences of another model": Case("Sequential is no transformers model", "set mesh.cp to 1", {"sequence": "ring 2"}, model=_own),
    "layers of another model": Case("no attention", "set mesh.tp to 1", {"tensor": "2"}, model=lambda: nn.Sequential(nn.Linear(3, 3))),
    "stages of another model": Case("mesh.pp is 2: Sequential is neither", "set mesh.pp to 1", config={"mesh": {"pp": 2}}, model=_own),
    "cut batches in stages": Case("mesh.cp is 2 and mesh.pp 2", "leave out sequence_parallel.batches", {
        "ranks": 4, "pipeline": "1f1b", "sequence": "ring 2"}, {"sequence_parallel": {"batches": "cut"}}),
    "heads": Case("the 3 heads of", "give another degree", {"tensor": "2"}, model=_heads),
    "rows of a head": Case("does not divide the 61 outputs of 'lm_head'", "set it to false", {"tensor": "2"}, {
        "tensor_parallel": {"loss_parallel": True}}),
    "optimizers of whole parameters": Case("looks at whole parameters", "set mesh.tp to 1", {"tensor": "2"}, MUON),
    "optimizers of whole parameters that experts stack": Case(
        "mesh.ep gives each rank a part", "updates each element by itself", {"model": "moe", "experts": 2}, LAMB),
    "usp without its degree": Case("`ulysses` and `attention", "usp splits", {"sequence": "ring 2"}, {
        "sequence_parallel": {"attention": "usp"}}),
    "usp of a degree that does not divide": Case("ulysses 3 does not divide", "give a divisor", {
        "ranks": 4, "sequence": "ulysses 2 x ring 2"}, {"sequence_parallel": {"attention": "usp", "ulysses": 3}}),
    "dropout in a ring": Case("dropout", "ulysses", {"sequence": "ring 2"}, model=_dropout),
    "a router's loss of all stages": Case("adds a loss of its routers", "output_router_logits=False", model=_router_loss),
    "too few micro-batches": Case("1 micro-batches on 2 ranks; it needs at least 4", "gradient_accumulation_steps", {
        "pipeline": "dualpipe-v"}),
    "two types": Case("`fp16.enabled` and `bf16.enabled` are both true", "switch one of them off", {"dtype": "fp16"}, {
        "bf16": {"enabled": True}}),
    "masters of 16 bits": Case("masters and gradients stay in fp32", "remove the key", config={
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    "a disk without a folder": Case("nvme_path is missing", "give the folder", config={
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}),
    "batches": Case("train_batch_size 7 is not", "correct it", config={"train_batch_size": 7}),
}  # fmt: skip


def refuse(rank: int, world: int, names: list[str], folder: str) -> list[Refused]:
    """Each case; then the model that was refused is trained as plain as can be."""
    import zeroengine

    zeroengine.init_distributed(verbose=False)
    zeroengine.initialize(model=_own(), config=space.settings({**PLAIN, "ranks": world}, folder))[0].destroy()  # what stays comes once
    found = []
    for name in names:
        case = CASES[name]
        row = {**PLAIN, **case.row}
        config = {**space.settings(row, folder), **case.config}
        gc.collect()
        before, kind, text = train.held(folder, rank), "", ""
        model: Any = None
        try:
            model = train.prepare(row) if case.model is None else case.model()
            before = train.held(folder, rank)
            zeroengine.initialize(model=model, config=config)
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        gc.collect()
        after = train.held(folder, rank)
        again = ""
        if kind and model is not None and not hasattr(model, "num_stages"):
            try:
                zeroengine.initialize(model=model, config=space.settings({**PLAIN, "ranks": world}, folder))[0].destroy()
            except Exception:
                again = traceback.format_exc()
        found.append(Refused(kind, text, before, after, again))
    return found
