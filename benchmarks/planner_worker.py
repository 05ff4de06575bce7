"""The job of a process in `benchmarks.planner`: one configuration trained for some steps, and all that the plan is held against."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import memory
from zeroengine.planner.model import ModelSource, find_model
from zeroengine.planner.passes import Ledger

VOCABULARY = 2048


def model_source(kind: str, layers: int, hidden: int) -> ModelSource:
    """A small transformers model without dropout: "llama", or "mixtral" with 4 experts of which every token takes all."""
    sizes = {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 1024,
    }  # fmt: skip
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": hidden} if kind == "mixtral" else {}
    return find_model(kind, {**sizes, **experts})


class PlanJob:
    """`layout`: the fields of `zeroengine.planner.layouts.Layout`; `config`: the engine's configuration made of it."""

    def __init__(self, model: dict[str, Any], layout: dict[str, Any], config: dict[str, Any], sequence: int, micro: int):
        import transformers

        import zeroengine

        torch.set_num_threads(1)
        torch.manual_seed(0)
        zeroengine.init_distributed("gloo")
        built: nn.Module = transformers.AutoModelForCausalLM.from_config(model_source(**model).config)
        self.layout, self.sequence, self.micro = layout, sequence, micro
        if layout["recompute"]:
            built.gradient_checkpointing_enable()  # type: ignore[operator]
        self.base = memory.resident_bytes() or 0
        self.engine, *_ = zeroengine.initialize(model=built, config=config)
        self.activations = 0

    def ready(self) -> dict[str, Any]:
        return {"rank": int(os.environ["RANK"])}

    def turn(self, steps: int) -> dict[str, Any]:
        """`steps` timed steps after two that are not, the first of which counts activations; memory and bytes are the last one's."""
        with Ledger(b.full for b in self.engine.mechanism.buckets if b.full is not None) as ledger:
            self._step(ledger)
        self._step()
        fabric = self.engine.mesh.fabric
        seconds = []
        for _ in range(steps):
            fabric.forget_sent()
            begin = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - begin)
        return {
            "seconds": seconds, "memory": self.engine.memory_report(), "sent": fabric.sent(), "activations": self.activations,
            "resident": (memory.resident_bytes() or 0) - self.base, "place": self.engine.mesh.coordinate("pp"),
        }  # fmt: skip

    def _step(self, ledger: Ledger | None = None) -> None:
        generator = torch.Generator().manual_seed(self.engine.mesh.sample_group)
        accumulation = self.engine.batch.accumulation
        if self.layout["pp"] > 1:
            self._watch_stages(ledger)
            self.engine.train_batch(iter([self._batch(generator) for _ in range(accumulation)]))
            return
        for _ in range(accumulation):
            loss = self.engine(**self._batch(generator), use_cache=False)["loss"]
            if ledger is not None:
                self.activations = max(self.activations, ledger.alive())
            self.engine.backward(loss)
            del loss
            self.engine.step()

    def _watch_stages(self, ledger: Ledger | None) -> None:
        """Looks at what is alive after each forward of a stage."""
        for runner in self.engine._executor.runners.values():
            plain = getattr(runner._forward, "plain", runner._forward)

            def forward(stage: int, micro: int, x: Any, plain: Any = plain) -> Any:
                output = plain(stage, micro, x)
                if ledger is not None:
                    self.activations = max(self.activations, ledger.alive())
                return output

            forward.plain = plain  # type: ignore[attr-defined]
            runner._forward = forward

    def _batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (self.micro, self.sequence), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}
