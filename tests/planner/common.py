"""A small model, layouts of it on two ranks, and what the engine makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.moe import ExpertBank, MoE
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


def job(ranks: int, batch: int, hardware: Hardware | None = None) -> Job:
    return Job(ranks, 80e9, SEQUENCE, batch, hardware or cpu(), "fp32")


def cpu() -> Hardware:
    """A machine of which only the kind of device matters."""
    from dataclasses import replace

    return replace(PRESETS["a100-80g"], device="cpu", name="cpu")


def measured(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Two steps of each layout: memory, bytes of the second step, and activations of one micro-batch."""
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
        engine, *_ = zeroengine.initialize(model=model, config=layout.config(job(world, batch), folder))
        held = [b.full for b in engine.mechanism.buckets if b.full is not None]
        activations = 0
        for _ in range(2):
            engine.mesh.fabric.forget_sent()
            ids = torch.arange(layout.micro * SEQUENCE).view(layout.micro, SEQUENCE) % VOCABULARY
            inputs = {"input_ids": ids, "labels": ids.clone()}
            if layout.pp > 1:
                engine.train_batch(iter([dict(inputs) for _ in range(engine.batch.accumulation)]))
                continue
            for _ in range(engine.batch.accumulation):
                with Ledger(held) as ledger:
                    loss = engine(**inputs, use_cache=False)["loss"]
                    activations = ledger.alive()
                engine.backward(loss)
                del loss
                engine.step()
        found[name] = {"memory": engine.memory_report(), "sent": engine.mesh.fabric.sent(), "activations": activations}
        engine.destroy()
    return found
