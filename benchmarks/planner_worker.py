"""The job of a process in `benchmarks.planner`: one configuration trained for some steps, and all that the plan is held against."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
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
        """`steps` timed steps after two that are not; the second of those counts activations, when buffers and state are there. Memory and
        bytes are the last one's."""
        self._step()
        with Ledger(b.full for b in self.engine.mechanism.buckets if b.full is not None) as ledger:
            self._step(ledger)
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
            with after_each_forward(self.engine, lambda: self._look(ledger)):
                self.engine.train_batch(iter([self._batch(generator) for _ in range(accumulation)]))
            return
        for _ in range(accumulation):
            loss = self.engine(**self._batch(generator), use_cache=False)["loss"]
            self._look(ledger)
            self.engine.backward(loss)
            del loss
            self.engine.step()

    def _look(self, ledger: Ledger | None) -> None:
        if ledger is not None:
            self.activations = max(self.activations, ledger.alive())

    def _batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (self.micro, self.sequence), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}


@contextlib.contextmanager
def after_each_forward(engine: Any, look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` after each forward of a stage of a pipeline."""
    runners = list(engine._executor.runners.values())
    plain = [runner._forward for runner in runners]

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: int, micro: int, x: Any) -> Any:
            output = forward(stage, micro, x)
            look()
            return output

        return run

    for runner, forward in zip(runners, plain, strict=True):
        runner._forward = wrapped(forward)
    try:
        yield
    finally:
        for runner, forward in zip(runners, plain, strict=True):
            runner._forward = forward
