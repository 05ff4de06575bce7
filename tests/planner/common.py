"""A small model, layouts of it on two ranks, and what the engine makes of them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.planner_worker import after_each_forward
from zeroengine.moe import ExpertBank, MoE
from zeroengine.pipe import LayerSpec, PipelineModule
from zeroengine.planner.hardware import PRESETS, Hardware
from zeroengine.planner.layouts import Job, Layout
from zeroengine.planner.model import ModelSource, find_model, from_factory
from zeroengine.planner.passes import Ledger

SEQUENCE, VOCABULARY = 16, 96
LAYOUTS: dict[str, tuple[str, int, Layout]] = {  # model, sequences of a step, layout
    "stage 0": ("llama", 4, Layout(dp_shard=2, stage=0, micro=1)),
    "stage 1": ("llama", 4, Layout(dp_shard=2, stage=1, micro=2)),
    "stage 2": ("llama", 8, Layout(dp_shard=2, stage=2, micro=2)),
    "stage 3": ("llama", 4, Layout(dp_shard=2, stage=3, micro=1)),
    "replicas": ("llama", 4, Layout(dp_replicate=2, stage=2, micro=1)),
    "recompute": ("llama", 4, Layout(dp_shard=2, stage=1, micro=2, recompute=True)),
    "disk": ("llama", 2, Layout(dp_shard=2, stage=1, micro=1, offload="nvme")),
    "tp": ("llama", 2, Layout(tp=2, micro=2)),
    "ulysses": ("llama", 2, Layout(cp=2, stage=1, micro=2)),
    "ring": ("llama", 2, Layout(cp=2, stage=2, micro=2, attention="ring")),
    "pp": ("llama", 8, Layout(pp=2, stage=1, micro=2)),
    "ep": ("mixtral", 8, Layout(dp_shard=2, ep=2, stage=1, micro=4)),
    "ep shared": ("qwen2_moe", 4, Layout(dp_shard=2, ep=2, stage=2, micro=2)),
    "tp experts": ("mixtral", 4, Layout(tp=2, micro=4)),
    "ep own": ("own", 8, Layout(dp_shard=2, ep=2, stage=1, micro=4)),
    "ep own 3": ("own", 4, Layout(dp_shard=2, ep=2, stage=3, micro=2)),
}


class OwnMixture(nn.Module):
    """A bank of our own with a shared expert, and a list of modules with a capacity. Every token goes to all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        shared = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 32))
        self.first = MoE(32, ExpertBank(4, 32, 48), k=4, drop_tokens=False, shared=shared)
        self.second = MoE(32, nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32)), num_experts=4, k=4)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool = False) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in (self.first, self.second):
            out, _, _ = layer(x)
            x = x + out
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def source(kind: str) -> ModelSource:
    """Small models without dropout. In those with experts every token goes to all of 4, so traffic does not depend on values."""
    if kind == "own":
        return from_factory(OwnMixture)
    if kind == "qwen2_moe":
        return find_model(kind, {
            "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
            "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        })  # fmt: skip
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    }  # fmt: skip
    return find_model(kind, {**sizes, **({"num_local_experts": 4, "num_experts_per_tok": 4} if kind == "mixtral" else {})})


def plan_inputs(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """The arguments of `Regression`, and a batch of `staged`."""
    return {"x": torch.zeros(batch, sequence, 8), "target": torch.zeros(batch, sequence, 8)}


class Regression(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


class Branches(Regression):
    """Looks at values."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x, target)


class Other(Regression):
    """Takes other arguments than `plan_inputs` gives."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layers(y).mean()  # type: ignore[no-any-return]


class Broken(Regression):
    """Has no memory for itself."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("width 8 is odd today")


def staged(num_stages: int = 1, stage_rank: int = 0, schedule: str = "1f1b", activation_checkpoint_interval: int = 0) -> nn.Module:
    return PipelineModule(
        [LayerSpec(nn.Linear, 8, 8) for _ in range(4)], num_stages, nn.functional.mse_loss, schedule=schedule,
        activation_checkpoint_interval=activation_checkpoint_interval, stage_rank=stage_rank,
    )  # fmt: skip


def job(ranks: int, batch: int, folder: str = "/nowhere") -> Job:
    return Job(ranks, 80e9, SEQUENCE, batch, cpu(), "fp32", nvme_path=folder)


def cpu() -> Hardware:
    """A machine of which only the kind of device matters."""
    return replace(PRESETS["a100-80g"], device="cpu", name="cpu")


def measured(rank: int, world: int, folder: str, written: str) -> dict[str, Any]:
    """Two steps of each layout: memory, bytes and activations of the second. Then a run of the configuration `written` by the command."""
    import transformers

    import zeroengine

    found = {}
    zeroengine.init_distributed("gloo")
    for name, (kind, batch, layout) in LAYOUTS.items():
        torch.manual_seed(0)
        config = source(kind).config
        model: nn.Module = OwnMixture() if config is None else transformers.AutoModelForCausalLM.from_config(config)
        if layout.recompute:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        engine, *_ = zeroengine.initialize(model=model, config=layout.config(job(world, batch, folder)))
        _step(engine, layout.micro)
        engine.mesh.fabric.forget_sent()
        activations = _step(engine, layout.micro, [b.full for b in engine.mechanism.buckets if b.full is not None])
        found[name] = {"memory": engine.memory_report(), "sent": engine.mesh.fabric.sent(), "activations": activations}
        engine.destroy()
    found["written"] = _run_written(written)
    return found


def _run_written(path: str) -> dict[str, Any]:
    """Six steps as the file says; the report, and what the error of a step without memory says."""
    import transformers

    import zeroengine
    from zeroengine.errors import OutOfMemoryError

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(source("llama").config)
    engine, *_ = zeroengine.initialize(model=model, config=path)
    for _ in range(6):
        _step(engine, engine.batch.micro)
    report, told = engine.report(), ""
    try:
        with engine.watch.phase("forward"):
            raise MemoryError("nothing left")
    except OutOfMemoryError as error:
        told = str(error)
    layout = {
        "degrees": engine.mesh.degrees.sizes(),
        "stage": engine.settings.zero_optimization.stage,
        "accumulation": engine.batch.accumulation,
    }
    engine.destroy()
    return {"report": json.loads(report.json()), "text": report.text(), "page": report.html(), "told": told, **layout}


def _step(engine: Any, micro: int, held: list[torch.Tensor] | None = None) -> int:
    """One step; with `held` the most bytes that are alive after a forward, beside those."""
    most = 0
    ledger = Ledger(held or [])

    def look() -> None:
        nonlocal most
        most = max(most, ledger.alive())

    count = engine.batch.accumulation
    with contextlib.nullcontext() if held is None else ledger:
        if engine.mesh.degrees.pp > 1:
            with after_each_forward(engine, look):
                engine.train_batch(iter([_inputs(micro) for _ in range(count)]))
            return most
        for _ in range(count):
            loss = engine(**_inputs(micro), use_cache=False)["loss"]
            look()
            engine.backward(loss)
            del loss
            engine.step()
    return most


def _inputs(micro: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(micro * SEQUENCE).view(micro, SEQUENCE) % VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}
