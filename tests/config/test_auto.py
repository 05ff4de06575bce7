"""`"auto"`: filled where the answer is known, an error by name where it is not, never left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroengine.config import FACTS, Config
from zeroengine.errors import ConfigError

HF = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto", "offload_param": {"device": "cpu", "buffer_size": "auto"}},
}  # fmt: skip
TOLD: dict[str, Any] = {
    "hidden_size": 64, "dtype": "bf16", "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1, "max_grad_norm": 0.5, "lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8,
    "weight_decay": 0.1, "warmup_num_steps": 10, "total_num_steps": 100,
}  # fmt: skip


def _autos(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_autos(item) for item in value.values())
    return int(value == "auto")


def test_all_filled_when_told() -> None:
    assert set(TOLD) == set(FACTS)
    config = Config.load(HF, facts=TOLD)
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (64 * 64, int(0.9 * 64 * 64))
    assert (zero.stage3_param_persistence_threshold, zero.stage3_max_live_parameters) == (640, 10**9)
    assert not zero.stage3_gather_16bit_weights_on_model_save and zero.offload_param.buffer_size == 10**8
    assert config.dtype == "bf16" and config.gradient_clipping == 0.5
    assert config.optimizer is not None and config.scheduler is not None
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert config.scheduler.params == {
        "warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100,
    }  # fmt: skip
    written = config.to_dict()
    assert _autos(written) == 0
    assert written["zero_optimization"]["prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert written["train_batch_size"] == 8 and config.undetermined == ()
    assert _autos(HF) == 20


def test_what_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(HF)
    text = str(caught.value)
    for path in ("gradient_clipping", "fp16.enabled", "bf16.enabled", "optimizer.params.lr", "optimizer.params.betas",
                 "scheduler.params.warmup_num_steps", "scheduler.params.warmup_max_lr"):  # fmt: skip
        assert f'`{path}` is "auto"' in text
    for path in ("reduce_bucket_size", "warmup_min_lr", "train_batch_size", "max_live"):
        assert path not in text


def test_what_follows_from_other_keys() -> None:
    config = Config.load({
        "train_batch_size": 8, "gradient_accumulation_steps": "auto", "bf16": {"enabled": True},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4}}, "mesh": {"dp_shard": "auto"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto"}},
    })  # fmt: skip
    assert config.dtype == "bf16" and config.undetermined == ("gradient_accumulation_steps",)
    assert config.scheduler is not None and config.scheduler.params == {"warmup_max_lr": 3e-4, "warmup_min_lr": 0}
    written = config.to_dict()
    assert written["fp16"] == {"enabled": False} and "gradient_accumulation_steps" not in written


def test_sizes_without_a_width_are_the_engines_choice() -> None:
    written = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}}
    config = Config.load(written)
    assert config.zero_optimization == Config.load({"zero_optimization": {"stage": 3}}).zero_optimization
    assert config.to_dict() == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("path", ["zero_optimization.stage", "zero_optimization.offload_param.device", "optimizer.params.x"])
def test_result_changing_keys_have_no_default_answer(path: str) -> None:
    value: Any = "auto"
    for name in reversed(path.split(".")):
        value = {name: value}
    if path.startswith("optimizer"):
        value["optimizer"]["type"] = "Adam"
    with pytest.raises(ConfigError, match=f'`{path}` is "auto"'):
        Config.load(value)
    assert Config.load(value, facts={path: {"stage": 2, "device": "cpu", "x": 5}[path.rpartition(".")[2]]})


def test_auto_in_sections_that_are_not_read() -> None:
    Config.load({"autotuning": {"enabled": False, "mp_size": "auto"}, "aio": {"block_size": "auto"}})


@pytest.mark.parametrize(
    ("fact", "dtype"), [("bfp16", "bf16"), (torch.bfloat16, "bf16"), ("Half", "fp16"), (" float32 ", "fp32"), ("fp32", "fp32")]
)
def test_spellings_of_the_precision(fact: Any, dtype: str) -> None:
    assert Config.load({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, facts={"dtype": fact}).dtype == dtype


@pytest.mark.parametrize("fact", ["fp61", None, torch.float64])
def test_a_precision_that_is_none_is_refused(fact: Any) -> None:
    with pytest.raises(ConfigError, match='the fact dtype has the value .*: expected one of "fp32", "fp16", "bf16"'):
        Config.load({"bf16": {"enabled": "auto"}}, facts={"dtype": fact})


def test_unknown_facts() -> None:
    with pytest.raises(ConfigError, match="unknown fact 'hiden_size'"):
        Config.load({}, facts={"hiden_size": 3})
