"""What the ranks of these tests run: Trainers on one tiny model, with and without an engine."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.tiny import Sentences, deepspeed_config, losses_of, stand_in

STEPS = 4


def fresh_accelerate() -> None:
    """Forgets accelerate's state, as a new program begins."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def arguments(folder: Path | str, **others: Any) -> Any:
    from transformers import TrainingArguments

    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS,
        "learning_rate": 1e-2, "max_grad_norm": 1.0, "logging_steps": 1, "save_strategy": "no", "seed": 11,
        "report_to": [], "disable_tqdm": True, "logging_nan_inf_filter": False, "dataloader_pin_memory": False, "warmup_steps": 2,
        "lr_scheduler_type": "linear", **others,
    }  # fmt: skip
    return TrainingArguments(str(folder), **chosen)


def plain_losses(rank: int, world: int, pretrained: str, folder: str) -> dict[str, Any]:
    """Losses of the Trainer by itself: DistributedDataParallel."""
    from transformers import AutoModelForCausalLM, Trainer

    args = arguments(folder, use_cpu=True)
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    trainer = Trainer(model, args, train_dataset=Sentences(22), eval_dataset=Sentences(7, seed=6))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    result = {"train": losses_of(trainer), "eval": evaluated, "logits": logits(trainer.model), "norms": norms_of(trainer)}
    return {**result, "generated": generated(trainer.model)}


def norms_of(trainer: Any) -> list[float]:
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


@torch.no_grad()
def logits(model: Any) -> list[float]:
    """What the model says of one sequence."""
    model.eval()
    values: list[float] = model(input_ids=Sentences(1, seed=9).ids).logits.flatten()[:100].tolist()
    return values


def generated(model: Any, **how: Any) -> list[int]:
    """Tokens made from a prompt and to a length that differ on the ranks."""
    rank = dist.get_rank()
    prompt = Sentences(1, seed=9).ids[:, : 2 + rank]
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_length=8 + 4 * rank, do_sample=False, **how)
    tokens: list[int] = made[0].tolist()
    return tokens


def saved_logits(folder: Path | str) -> list[float]:
    """The same of a saved model, loaded in this process alone and whole."""
    import transformers.integrations.deepspeed as hf
    from transformers import AutoModelForCausalLM

    before, hf._hf_deepspeed_config_weak_ref = hf._hf_deepspeed_config_weak_ref, None
    try:
        return logits(AutoModelForCausalLM.from_pretrained(folder))
    finally:
        hf._hf_deepspeed_config_weak_ref = before


def run_cases(rank: int, world: int, pretrained: str, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One Trainer after the other in the same process."""
    stand_in()
    results = []
    for i, case in enumerate(cases):
        fresh_accelerate()
        results.append(_run(pretrained, Path(folder) / f"case{i}", **case))
    fresh_accelerate()
    results.append(_best(pretrained, Path(folder) / "best"))
    return results


def _best(pretrained: str, folder: Path) -> dict[str, Any]:
    """A rate that ruins the model under ZeRO-3: the best checkpoint, which is loaded at the end, is not the last."""
    from transformers import AutoModelForCausalLM, Trainer

    args = arguments(
        folder, deepspeed=deepspeed_config(3), save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, learning_rate=0.3, warmup_steps=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    trainer = Trainer(model, args, train_dataset=Sentences(22), eval_dataset=Sentences(7, seed=6))
    trainer.train()
    evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    result = {"evals": evals, "best": trainer.evaluate()["eval_loss"]}
    trainer.accelerator.free_memory(trainer.model_wrapped)
    return result


def _run(
    pretrained: str, folder: Path, stage: int, optimizer: bool = True, scheduler: bool = True, model_first: bool = False,
    offload: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`offload`: devices of `optimizer` and `param`."""
    from transformers import AutoModelForCausalLM, Trainer

    config = deepspeed_config(stage, optimizer=optimizer, scheduler=scheduler)
    for kind, device in (offload or {}).items():
        config["zero_optimization"][f"offload_{kind}"] = {"device": device, "nvme_path": str(folder), "pin_memory": True}
    again = copy.deepcopy(config)  # transformers fills in what is "auto"
    model = AutoModelForCausalLM.from_pretrained(pretrained) if model_first else None
    args = arguments(folder, deepspeed=config, save_strategy="steps", save_steps=2)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(pretrained)
    data, held_out = Sentences(22), Sentences(7, seed=6)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    result: dict[str, Any] = {"train": losses_of(trainer), "norms": norms_of(trainer), "eval": trainer.evaluate()["eval_loss"]}
    result["logits"] = logits(trainer.model)
    trainer.save_model()
    result["generated"] = generated(trainer.model)
    trainer.accelerator.free_memory(trainer.model_wrapped)
    dist.barrier()
    if dist.get_rank() == 0:
        result["saved"] = saved_logits(folder)
    dist.barrier()
    # again from the checkpoint in the middle
    fresh_accelerate()
    args = arguments(folder, deepspeed=again)
    resumed = Trainer(AutoModelForCausalLM.from_pretrained(pretrained), args, train_dataset=data)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    result["resumed"] = losses_of(resumed)
    resumed.accelerator.free_memory(resumed.model_wrapped)
    assert all(math.isfinite(x) for x in result["train"])
    return result


def native_cases(rank: int, world: int, pretrained: str, folder: str, stages: list[int]) -> list[dict[str, Any]]:
    """The Trainer by itself, and ZeroTrainer at each stage; without the stand-in."""
    plain = plain_losses(rank, world, pretrained, f"{folder}/plain")
    return [plain, *(_native(pretrained, Path(folder) / f"stage{stage}", stage) for stage in stages)]


def _native(pretrained: str, folder: Path, stage: int) -> dict[str, Any]:
    import importlib.util

    from transformers import AutoModelForCausalLM

    from zeroengine.errors import ConfigError
    from zeroengine.integrations.transformers import ZeroTrainer

    assert importlib.util.find_spec("deepspeed") is None
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if stage == 3:
        config["optimizer"] = {"type": "AdamW", "params": {name: "auto" for name in ("lr", "betas", "eps", "weight_decay")}}

    def trainer(**others: Any) -> Any:
        args = arguments(folder, use_cpu=True, **others)
        model = AutoModelForCausalLM.from_pretrained(pretrained)
        return ZeroTrainer(model, args, train_dataset=Sentences(22), eval_dataset=Sentences(7, seed=6), config=config)

    first = trainer(save_strategy="steps", save_steps=2)
    first.train()
    result: dict[str, Any] = {"train": losses_of(first), "norms": norms_of(first), "eval": first.evaluate()["eval_loss"]}
    result |= {"logits": logits(first.model), "generated": generated(first.model, synced_gpus=stage == 3)}
    first.save_model()
    dist.barrier()
    result["saved"] = logits(AutoModelForCausalLM.from_pretrained(folder))
    again = trainer()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    result["resumed"] = losses_of(again)
    # a rate that ruins the model: the best one is not the last
    best = trainer(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, learning_rate=0.3)
    best.train()
    result["evals"] = [entry["eval_loss"] for entry in best.state.log_history if "eval_loss" in entry]
    result["best"] = best.evaluate()["eval_loss"]
    try:
        ZeroTrainer(
            AutoModelForCausalLM.from_pretrained(pretrained), arguments(folder, use_cpu=True), train_dataset=Sentences(8),
            config={**config, "gradient_clipping": 0.3},
        ).train()  # fmt: skip
    except ConfigError as error:
        result["refused"] = str(error)
    return result
