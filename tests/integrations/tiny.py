"""A tiny language model, its data, and the configurations that the tests of this folder share."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

LENGTH, VOCABULARY = 12, 64


def stand_in() -> None:
    """Puts zeroengine in the place of deepspeed, before anything asks for that."""
    importlib.import_module("zeroengine.integrations.deepspeed")


def model_config(tied: bool = True) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, use_cache=True,
    )  # fmt: skip


def pretrained(folder: Path, tied: bool = True) -> Path:
    """A folder with a model as `save_pretrained` writes it."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(model_config(tied))
    with torch.no_grad():
        for p in model.parameters():  # far from where initialisers put them, so that re-initialised ones are seen
            p.mul_(3.0)
    model.save_pretrained(folder)
    return folder


class Sentences(Dataset[dict[str, Any]]):
    """Sequences whose number of counted tokens differs from one to the next."""

    def __init__(self, samples: int, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.ids[index].clone()
        labels[: (index * 5) % (LENGTH - 2)] = -100
        return {"input_ids": self.ids[index].clone(), "labels": labels}


def deepspeed_config(stage: int, *, auto: bool = True, optimizer: bool = True, scheduler: bool = True) -> dict[str, Any]:
    """As in transformers' documentation: everything that the Trainer knows is "auto"."""
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {
            "stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 1e5,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip
    if optimizer:
        params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if scheduler:
        params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    return config


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def close(left: list[float], right: list[float], tolerance: float = 1e-5) -> bool:
    return len(left) == len(right) > 0 and all(math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(left, right, strict=True))
