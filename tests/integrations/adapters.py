"""What the ranks run for adapters: peft and trl with and without an engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.jobs import arguments, fresh_accelerate, generated, logits
from tests.integrations.tiny import Sentences, deepspeed_config, losses_of, stand_in

KINDS = ("lora", "dora", "modules_to_save", "prompt")


def adapter(kind: str) -> Any:
    from peft import LoraConfig, PromptTuningConfig

    if kind == "prompt":
        return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=12)  # beyond what stays whole for its size
    more: dict[str, Any] = {"modules_to_save": ["lm_head"]} if kind == "modules_to_save" else {"use_dora": kind == "dora"}
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], **more)


def quantized(kind: str) -> dict[str, Any]:
    """What `from_pretrained` is told of the base's weights."""
    if kind != "qlora":
        return {}
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)}


def keep_format(model: Any) -> None:
    """Evaluation without an engine in the precision of training: bitsandbytes packs weights anew for bf16 where the CPU has that."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def run_adapters(rank: int, world: int, pretrained: str, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One adapter after the other; `stage` None, which comes first, is the Trainer without an engine."""
    stand_in()
    results = []
    for i, case in enumerate(cases):
        fresh_accelerate()
        torch.manual_seed(1)
        results.append(_train_adapter(pretrained, Path(folder) / f"case{i}", **case))
    return results


def _train_adapter(pretrained: str, folder: Path, kind: str, stage: int | None, checkpointing: bool = False) -> dict[str, Any]:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, Trainer

    how: dict[str, Any] = {"use_cpu": True} if stage is None else {"deepspeed": deepspeed_config(stage, optimizer=False, scheduler=False)}
    args = arguments(folder, gradient_checkpointing=checkpointing, learning_rate=5e-2, **how)
    base = AutoModelForCausalLM.from_pretrained(pretrained, **quantized(kind))
    torch.manual_seed(2)
    model = get_peft_model(base, adapter(kind))
    if stage is None:
        keep_format(model)
    if checkpointing:
        model.enable_input_require_grads()
    trainer = Trainer(model, args, train_dataset=Sentences(16))
    trainer.train()
    result: dict[str, Any] = {"train": losses_of(trainer), "logits": logits(trainer.model)}
    result["generated"] = generated(trainer.model) if kind != "prompt" else []
    trainable, total = model.get_nb_trainable_parameters()
    trainer.save_model()
    result |= {"trainable": trainable, "total": total}
    if stage is not None:
        trainer.accelerator.free_memory(trainer.model_wrapped)
    dist.barrier()
    if dist.get_rank() == 0:
        result |= saved_adapter(pretrained, folder, kind)
    dist.barrier()
    return result


def saved_adapter(pretrained: str, folder: Path, kind: str) -> dict[str, Any]:
    """The adapter that was saved, loaded onto the base in one process; and merged, where that exists."""
    import transformers.integrations.deepspeed as hf
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    before, hf._hf_deepspeed_config_weak_ref = hf._hf_deepspeed_config_weak_ref, None
    try:
        state = load_file(folder / "adapter_model.safetensors")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pretrained, **quantized(kind)), folder)
        keep_format(model)
        result: dict[str, Any] = {"saved": logits(model), "zero": [k for k, v in state.items() if not v.numel() or not v.any()]}
        if kind not in ("prompt", "qlora"):  # merged into 4 bits, the adapter is rounded
            result["merged"] = logits(model.merge_and_unload())
        return result
    finally:
        hf._hf_deepspeed_config_weak_ref = before


def run_trl(rank: int, world: int, pretrained: str, folder: str, cases: list[tuple[str, int | None]]) -> list[dict[str, Any]]:
    """trl's trainers ("sft" on prompts and completions, "dpo" with a reference model, which gets an engine of its own); stage None
    is without an engine."""
    stand_in()
    results = []
    for i, (kind, stage) in enumerate(cases):
        fresh_accelerate()
        results.append(_trl(kind, pretrained, Path(folder) / f"{kind}{i}", stage))
    return results


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i + 4 for i in range(60)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def words(first: int, count: int) -> str:
    return " ".join(f"w{(first + j) % 50}" for j in range(count))


def _trl(kind: str, pretrained: str, folder: Path, stage: int | None) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    how: dict[str, Any] = {"use_cpu": True} if stage is None else {"deepspeed": deepspeed_config(stage, optimizer=False, scheduler=False)}
    common: dict[str, Any] = dict(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", seed=11, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, bf16=False, max_length=16,
        gradient_checkpointing=False, **how,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    trainer: Any
    if kind == "sft":
        data = Dataset.from_list([{"prompt": words(i * 7, 2 + i % 4), "completion": " " + words(i, 1 + i % 5)} for i in range(24)])
        args = SFTConfig(str(folder), completion_only_loss=True, **common)
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())
    else:
        pairs = [{"prompt": words(i, 3), "chosen": " " + words(i + 3, 3), "rejected": " " + words(i * 5, 4)} for i in range(24)]
        args = DPOConfig(str(folder), **common)
        trainer = DPOTrainer(model, None, args, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer())
    trainer.train()
    result = {"train": losses_of(trainer), "logits": logits(trainer.model)}
    if stage is not None:
        trainer.accelerator.free_memory(trainer.model_wrapped)
    return result


def run_adalora(rank: int, world: int, pretrained: str, stages: list[int | None]) -> list[list[float]]:
    """Losses of a loop that gives ranks to its adapters by their gradients: AdaLoRA, with `stage` None first. At stage 3 it sees and
    edits its weights gathered."""
    stand_in()
    importlib.import_module("deepspeed").init_distributed()
    return [_train_adalora(pretrained, stage) for stage in stages]


def _train_adalora(pretrained: str, stage: int | None) -> list[float]:
    import deepspeed
    import transformers.integrations.deepspeed as hf
    from peft import AdaLoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(pretrained)
    torch.manual_seed(2)
    plan = AdaLoraConfig(
        task_type="CAUSAL_LM", init_r=6, target_r=2, tinit=1, tfinal=2, deltaT=1, total_step=8, target_modules=["q_proj", "v_proj"],
    )  # fmt: skip
    model = get_peft_model(base, plan)
    weights = [p for p in model.parameters() if p.requires_grad]
    ids = Sentences(2 * dist.get_world_size()).ids
    losses = []
    if stage is None:
        optimizer = torch.optim.SGD(weights, lr=1.0)
        for step in range(6):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.base_model.update_and_allocate(step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    kept = hf.HfDeepSpeedConfig(config)  # peft asks transformers whether an engine is there
    engine = deepspeed.initialize(model=model, config=config, model_parameters=weights)[0]
    mine = ids[2 * dist.get_rank() :][:2]
    for step in range(6):
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        with deepspeed.zero.GatheredParameters(weights if stage == 3 else [], modifier_rank=0):
            model.base_model.update_and_allocate(step)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    engine.destroy()
    del kept
    return losses
