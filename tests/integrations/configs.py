"""Tries configuration files: two steps of a tiny model on the ranks there are, or the reason why not.

    zerorun --nproc 2 --module tests.integrations.configs FOLDER OUT.md

A file that says "auto" goes through transformers' Trainer, with arguments that agree with what it fixes; any other file, and one
with 16-bit weights where there is no GPU (accelerate refuses those), through deepspeed.initialize with the answers that a Trainer
would have given.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.integrations.jobs import arguments, fresh_accelerate
from tests.integrations.tiny import LENGTH, Sentences, model_config, stand_in

STEPS = 2
_LONGEST = 240  # characters of a reason in the table
_MOST_MICRO_BATCHES = 64  # more are cut down: it is the keys that are tried, not the machine


@dataclass(frozen=True)
class Outcome:
    """What became of one file: through what, and "trained" or the reason."""

    file: str
    way: str
    result: str

    @property
    def trained(self) -> bool:
        return self.result.startswith("trained")


def try_file(path: Path, world: int) -> Outcome:
    """Trains two steps under the file. Collective. An error is an outcome if it is one of the engine's or of Hugging Face's."""
    from zeroengine.config.source import read
    from zeroengine.errors import ZeroEngineError

    way = "initialize"
    try:
        values = read(path).values
        if _has_auto(values) and not _sixteen_bit(values) and _strict_json(path):
            way = "Trainer"
            return Outcome(path.name, way, f"trained, stage {_train_by_trainer(path, values, world)}")
        return Outcome(path.name, way, f"trained, stage {_train_by_initialize(values, world)}")
    except (ZeroEngineError, ValueError, RuntimeError) as error:
        return Outcome(path.name, way, "refused: " + _short(str(error)))


def _has_auto(values: Any) -> bool:
    if isinstance(values, Mapping):
        return any(_has_auto(v) for v in values.values())
    return bool(values == "auto")


def _sixteen_bit(values: Mapping[str, Any]) -> bool:
    sections = [values.get(name) for name in ("fp16", "bf16", "bfloat16")]
    return any(isinstance(s, Mapping) and s.get("enabled") is True for s in sections)


def _strict_json(path: Path) -> bool:
    """Hugging Face reads with json.load."""
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def answers(values: Mapping[str, Any], world: int) -> dict[str, Any]:
    """What the program says where the file says "auto" or nothing; where it says something, the same."""
    section = values.get("optimizer")
    params = section.get("params", {}) if isinstance(section, Mapping) else {}
    micro = int(_number(values.get("train_micro_batch_size_per_gpu"), 1))
    steps = int(_number(values.get("gradient_accumulation_steps"), 1))
    whole = values.get("train_batch_size")
    if isinstance(whole, int) and values.get("gradient_accumulation_steps") in (None, "auto"):
        steps = max(1, whole // (micro * world))
    betas = params.get("betas")
    return {
        "micro": micro, "steps": steps, "clip": _number(values.get("gradient_clipping"), 1.0), "lr": _number(params.get("lr"), 1e-3),
        "betas": betas if isinstance(betas, list) else [0.9, 0.999], "eps": _number(params.get("eps"), 1e-8),
        "decay": _number(params.get("weight_decay"), 0.0),
    }  # fmt: skip


def _train_by_trainer(path: Path, values: Mapping[str, Any], world: int) -> int:
    from transformers import LlamaForCausalLM, Trainer

    fresh_accelerate()
    a = answers(values, world)
    schedule = values.get("scheduler")
    warmup = schedule.get("params", {}).get("warmup_num_steps") if isinstance(schedule, Mapping) else None
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder, deepspeed=str(path), per_device_train_batch_size=a["micro"], gradient_accumulation_steps=a["steps"],
            max_steps=STEPS, max_grad_norm=a["clip"], learning_rate=a["lr"], adam_beta1=a["betas"][0], adam_beta2=a["betas"][1],
            adam_epsilon=a["eps"], weight_decay=a["decay"], warmup_steps=int(_number(warmup, 1)),
        )  # fmt: skip
        trainer = Trainer(LlamaForCausalLM(model_config()), args, train_dataset=Sentences(STEPS * a["micro"] * a["steps"] * world))
        trainer.train()
        engine = trainer.model_wrapped
        _check(engine)
        stage = int(engine.zero_optimization_stage())
        trainer.accelerator.free_memory(engine)
    return stage


def _train_by_initialize(values: dict[str, Any], world: int) -> int:
    import deepspeed
    from transformers import LlamaForCausalLM

    from zeroengine.config import Config

    a = answers(values, world)
    facts = {
        "hidden_size": 32, "dtype": "fp32", "train_micro_batch_size_per_gpu": a["micro"], "gradient_accumulation_steps": a["steps"],
        "train_batch_size": a["micro"] * a["steps"] * world, "max_grad_norm": a["clip"], "lr": a["lr"], "betas": a["betas"],
        "eps": a["eps"], "weight_decay": a["decay"], "warmup_num_steps": 1, "total_num_steps": STEPS,
    }  # fmt: skip
    filled = Config.load(values, facts=facts).to_dict()
    if not any(filled.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")):
        filled["train_micro_batch_size_per_gpu"] = 1  # the files of some projects leave the batch to the script
    deepspeed.init_distributed()
    model = LlamaForCausalLM(model_config())
    own = torch.optim.AdamW(model.parameters(), lr=1e-3) if not filled.get("optimizer") else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, model_parameters=model.parameters(), config=filled)
    data = Sentences(64)
    micro_batches = engine.gradient_accumulation_steps()
    if micro_batches > _MOST_MICRO_BATCHES:
        engine.set_train_batch_size(engine.train_batch_size() // micro_batches * _MOST_MICRO_BATCHES)
    rows = min(engine.train_micro_batch_size_per_gpu(), 32)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        ids = data.ids[torch.randint(0, 64, (rows,))][:, :LENGTH]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    _check(engine)
    stage = int(engine.zero_optimization_stage())
    engine.destroy()
    return stage


def _check(engine: Any) -> None:
    if engine.global_steps != STEPS:
        raise AssertionError(f"{engine.global_steps} steps were taken in place of {STEPS}")
    if not (engine.was_step_applied() or engine.fp16_enabled()):  # the first loss scale of fp16 may be too large
        raise AssertionError("the last step was not applied")


def _short(text: str) -> str:
    """A reason as one line, without the place of the file."""
    lines = [line.strip(" -") for line in text.splitlines() if line.strip()]
    kept = "; ".join(lines[1:]) if len(lines) > 1 and "problems:" in lines[0] else " ".join(lines)
    kept = re.sub(r"^\S*/\S+?(\.jsonc?|\.json5): ", "", kept)
    kept = kept.removeprefix("config: ").replace("|", "\\|")
    return kept if len(kept) <= _LONGEST else kept[: kept.rfind(" ", 0, _LONGEST)] + " …"


def table(outcomes: list[Outcome]) -> str:
    trained = sum(o.trained for o in outcomes)
    rows = "\n".join(f"| {o.file} | {o.way} | {o.result} |" for o in outcomes)
    counts = f"{len(outcomes)} files: {trained} trained, {len(outcomes) - trained} refused."
    return f"{counts}\n\n| file | through | outcome |\n|---|---|---|\n{rows}\n"


def main(folder: str, out: str) -> None:
    stand_in()
    from zeroengine.comm import get_rank, get_world_size, init_distributed

    logging.getLogger("zeroengine").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    init_distributed()
    outcomes = []
    for path in sorted(Path(folder).glob("*.json*")):
        outcomes.append(try_file(path, get_world_size()))
        if get_rank() == 0:
            sys.stdout.write(f"{outcomes[-1]}\n")
            sys.stdout.flush()
    if get_rank() == 0:
        Path(out).write_text(table(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
