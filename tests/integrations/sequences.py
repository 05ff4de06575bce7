"""What the ranks run for Trainers whose ranks share sequences, with and without the stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.integrations.jobs import arguments, fresh_accelerate, generated, logits, norms_of, saved_logits
from tests.integrations.tiny import Sentences, deepspeed_config, losses_of, stand_in

STEPS, SAVED = 5, 4  # three steps an epoch: what is saved lies inside the second
WAYS = ("native", "ulysses", "ring")  # once transformers was told of deepspeed, the process is for that


class Uniform(Sentences):
    """Every token counts: then the mean of the means of micro-batches is that over tokens."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index].clone(), "labels": self.ids[index].clone()}


def run_sequences(rank: int, world: int, pretrained: str, folder: str) -> dict[str, dict[str, Any]]:
    """All of this file. A step of the Trainer by itself has one micro-batch on each of two ranks, one of shared sequences two."""
    stand_in()
    found = {}
    for name in ("uniform", "plain", *WAYS):
        fresh_accelerate()
        found[name] = _train(pretrained, Path(folder) / name, name)
    fresh_accelerate()
    found["layers"] = _shared_layers(pretrained, Path(folder) / "layers")
    return found


def _shared_layers(pretrained: str, folder: Path) -> dict[str, Any]:
    """Layers split over two ranks, which read the same micro-batches of twice the samples."""
    from transformers import AutoModelForCausalLM, Trainer

    from zeroengine.errors import ConfigError

    def trainer(**section: Any) -> Any:
        config = deepspeed_config(2, optimizer=False, scheduler=False) | section
        args = arguments(folder, deepspeed=config, per_device_train_batch_size=4, gradient_accumulation_steps=1, max_steps=STEPS)
        return Trainer(AutoModelForCausalLM.from_pretrained(pretrained), args, train_dataset=Sentences(10))

    made = trainer(tensor_parallel={"autotp_size": 2})
    made.train()
    assert made.model_wrapped.mesh.degrees.tp == 2 and made.model_wrapped.train_batch_size() == 4
    result: dict[str, Any] = {"train": losses_of(made)}
    made.accelerator.free_memory(made.model_wrapped)
    fresh_accelerate()
    try:
        trainer(mesh={"cp": 2}).train()
    except ConfigError as error:
        result["refused"] = str(error)
    return result


def _trainer(pretrained: str, folder: Path, way: str, **others: Any) -> Any:
    from accelerate import ParallelismConfig
    from transformers import AutoModelForCausalLM, Trainer

    from zeroengine.integrations.transformers import ZeroTrainer

    data: Any = Sentences(10) if way in ("plain", "native") else Uniform(10)
    shared = way in WAYS
    how: dict[str, Any] = {"use_cpu": True, "gradient_accumulation_steps": 2 if shared else 1, "max_steps": STEPS, **others}
    kind, more = Trainer, {}
    if way in ("ulysses", "ring"):
        config = deepspeed_config(3 if way == "ulysses" else 2, optimizer=way == "ring", scheduler=False)
        config["sequence_parallel"] = {"attention": way}
        how |= {"deepspeed": config, "parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=2)}
        del how["use_cpu"]
    elif way == "native":
        kind, more = ZeroTrainer, {"config": {"zero_optimization": {"stage": 3}, "mesh": {"cp": 2}}}
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    held_out = type(data)(7, seed=6)
    return kind(model, arguments(folder, **how), train_dataset=data, eval_dataset=held_out, **more)


def _train(pretrained: str, folder: Path, way: str) -> dict[str, Any]:
    trainer = _trainer(pretrained, folder, way, save_strategy="steps", save_steps=SAVED)
    trainer.train()
    result: dict[str, Any] = {"train": losses_of(trainer), "norms": norms_of(trainer), "eval": trainer.evaluate()["eval_loss"]}
    result |= {"logits": logits(trainer.model), "generated": generated(trainer.model, synced_gpus=way != "plain")}
    if way not in WAYS:
        return result
    assert trainer.model_wrapped.mesh.degrees.cp == 2
    trainer.save_model()
    dist.barrier()
    result["saved"] = saved_logits(folder)
    trainer.accelerator.free_memory(trainer.model_wrapped)
    fresh_accelerate()
    resumed = _trainer(pretrained, folder, way)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    result["resumed"] = losses_of(resumed)
    resumed.accelerator.free_memory(resumed.model_wrapped)
    return result
