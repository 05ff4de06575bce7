"""transformers' Trainer on zeroengine beside the same Trainer on DeepSpeed, FSDP2 and DistributedDataParallel, in one run.

    python -m benchmarks.hf_trainer --json out.json

Each system trains the same random Llama on the same random tokens (2 processes, fp32, torch's fused AdamW), once a round, the
rounds in rotated order. Reported: the median step of a round, the median of rounds, the ratio to zeroengine of the same stage in
the same round, and resident memory above that before the model existed, per parameter. A system that is not installed is left out
with a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import harness, memory
from benchmarks.errors import Unavailable, WorkerFailed
from zeroengine.arguments import positive

STAGES = (1, 2, 3)
SYSTEMS = ("ddp", "fsdp2", *(f"{engine}-{stage}" for stage in STAGES for engine in ("deepspeed", "zeroengine")))
REFERENCE = {"ddp": "zeroengine-1", "fsdp2": "zeroengine-3", **{f"deepspeed-{s}": f"zeroengine-{s}" for s in STAGES}}
_WARM = 3  # steps before the first that counts


class TrainerJob:
    """One Trainer on one rank, for one call of `turn`."""

    def __init__(self, system: str, hidden: int, layers: int, micro: int, length: int, steps: int) -> None:
        self._system, self._steps, self._micro = system, steps, micro
        self._sizes = (hidden, layers, length)
        if system.startswith("zeroengine"):
            importlib.import_module("zeroengine.integrations.deepspeed")
        elif system.startswith("deepspeed"):
            if importlib.util.find_spec("deepspeed") is None:
                raise Unavailable("deepspeed is not installed")
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            # Without its own backend accelerate takes every CPU rank under DeepSpeed for the only one.
            importlib.import_module("accelerate").PartialState(backend="gloo")

    def ready(self) -> dict[str, Any]:
        import transformers

        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def turn(self) -> dict[str, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer

        hidden, layers, length = self._sizes
        config = LlamaConfig(
            vocab_size=4096, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=8, tie_word_embeddings=False,
        )  # fmt: skip
        torch.manual_seed(0)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        start = memory.resident_bytes() or 0
        memory.reset_peak()
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            args = self._arguments(folder)
            if self._system == "fsdp2":
                _let_accelerate_shard_on_cpus()
            model = LlamaForCausalLM(config)
            parameters = sum(p.numel() for p in model.parameters())
            data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 4096, (self._steps * self._micro * 2, length))]
            trainer = Trainer(model, args, train_dataset=data, callbacks=[clock.callback()])
            trainer.train()
            _check_is(self._system, trainer.model_wrapped)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {
            "step": statistics.median(clock.steps[_WARM:]),
            "resident": ((clock.resident or 0) - start) / parameters,
            "peak": ((memory.peak_bytes() or 0) - start) / parameters,
            "parameters": parameters,
            "loss": losses[-1],
        }

    def _arguments(self, folder: str) -> Any:
        from transformers import TrainingArguments

        how: dict[str, Any] = {}
        name, _, stage = self._system.partition("-")
        if name == "ddp":
            how = {"use_cpu": True, "ddp_find_unused_parameters": False}
        elif name == "fsdp2":
            wrap = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
            how = {"use_cpu": True, "fsdp": "full_shard auto_wrap", "fsdp_config": wrap}
        else:
            batch = {k: "auto" for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
            how["deepspeed"] = {"zero_optimization": {"stage": int(stage)}, "gradient_clipping": "auto", **batch}
        if name == "deepspeed":
            how["accelerator_config"] = {"use_configured_state": True}
        return TrainingArguments(
            folder, per_device_train_batch_size=self._micro, max_steps=self._steps, logging_steps=self._steps, save_strategy="no",
            report_to=[], disable_tqdm=True, dataloader_pin_memory=False, seed=1, **how,
        )  # fmt: skip


def _let_accelerate_shard_on_cpus() -> None:
    """accelerate takes FSDP's section for accelerators only, and wraps the model of CPU ranks in DistributedDataParallel without a word."""
    from accelerate.state import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _check_is(system: str, model: nn.Module) -> None:
    """Raises `Unavailable` if something else than `system` trained."""
    found = type(model).__name__
    sharded = sum(isinstance(p, DTensor) for p in model.parameters())
    wanted = {"ddp": found == "DistributedDataParallel", "fsdp2": sharded == len(list(model.parameters()))}
    if not wanted.get(system, found in ("DeepSpeedEngine", "ZeroEngine")):
        raise Unavailable(f"{system}: the Trainer used {found} with {sharded} sharded parameters")


class Clock:
    """Seconds of each step, and resident memory after the last one."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.resident: int | None = None
        self._began = 0.0

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock._began = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.steps.append(time.perf_counter() - clock._began)
                clock.resident = memory.resident_bytes()

        return Callback()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    facts = harness.machine()
    rounds: dict[str, list[dict[str, Any]]] = {}
    missing: dict[str, str] = {}
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "micro", "length", "steps")}
    for number in range(options.rounds):
        for system in harness.rotated(options.systems, number):
            if system in missing:
                continue
            harness.say(f"round {number + 1}: {system}")
            try:
                with harness.WorkerGroup(
                    system, "benchmarks.hf_trainer:TrainerJob", {"system": system, **sizes}, python=sys.executable, world=2,
                    threads=1, timeout=300.0,
                ) as group:  # fmt: skip
                    answers = group.ask({})
            except (Unavailable, WorkerFailed) as reason:
                missing[system] = str(reason)
                harness.say(str(reason))
                continue
            rounds.setdefault(system, []).append({key: max(a[key] for a in answers) for key in ("step", "resident", "peak", "loss")})
        harness.say(render({"rounds": rounds}))
    return {"machine": facts, "sizes": sizes, "rounds": rounds, "missing": missing}


def render(result: dict[str, Any]) -> str:
    rows = []
    for system, records in result["rounds"].items():
        step = statistics.median(r["step"] for r in records)
        other = result["rounds"].get(REFERENCE.get(system, ""), [])
        ratios = [a["step"] / b["step"] for a, b in zip(records, other, strict=False)]
        rows.append(
            [
                system, f"{step:.3f}", harness.number(statistics.median(ratios) if ratios else None, ".2f"),
                f"{statistics.median(r['resident'] for r in records):.1f}", f"{max(r['peak'] for r in records):.1f}",
                f"{records[-1]['loss']:.4f}",
            ]
        )  # fmt: skip
    header = ["Trainer on", "step s", "x zeroengine", "bytes/parameter", "peak", "last loss"]
    return harness.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=12)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--micro", type=positive, default=2)
    parser.add_argument("--length", type=positive, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options)
    warning = harness.idle_warning(result["machine"])
    if warning is not None:
        harness.say(warning)
    harness.write(render(result))
    if options.json is not None:
        harness.write_json(options.json, result)


if __name__ == "__main__":
    main()
