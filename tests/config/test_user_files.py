"""Files as users write them: a form of each kind that public configurations have, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from zeroengine.config import Config
from zeroengine.errors import ConfigError

FACTS = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.5, "dtype": "bf16"}

COMMENTED = """
// the effective batch is 32
train_batch_size: 32          # brace-less, unquoted
"gradient_clipping": "1.0",   /* a quoted number */
zero_optimization: {
  stage: "3",
  reduce_bucket_size: 5e8,
  "stage3_max_live_parameters": 1e9,
  "param_persistence_threshold": 1.0e4,   // the short spelling
  "sub_group_size": 1e9,
  "offload_optimizer": {"device": "None", "pin_memory": "True"},
},
bfloat16: {enabled: true,},
"steps_per_print": Infinity,
"wall_clock_breakdown": "False"
"""


def test_a_text_with_every_liberty() -> None:
    config = Config.load(COMMENTED)
    zero = config.zero_optimization
    assert config.train_batch_size == 32 and config.gradient_clipping == 1.0 and config.bf16.enabled
    assert (zero.stage, zero.reduce_bucket_size, zero.stage3_max_live_parameters) == (3, 500_000_000, 10**9)
    assert zero.stage3_param_persistence_threshold == 10_000 and type(zero.reduce_bucket_size) is int
    assert zero.offload_optimizer.device == "none" and zero.offload_optimizer.pin_memory
    assert config.steps_per_print is None and config.wall_clock_breakdown is False


def _trainer(**more: Any) -> dict[str, Any]:
    auto = {name: "auto" for name in ("lr", "betas", "eps", "weight_decay")}
    return {
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": auto}, "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9}, **more,
    }  # fmt: skip


def test_a_trainers_file_with_its_answers() -> None:
    config = Config.load(_trainer(), facts=FACTS)
    assert config.optimizer is not None and dict(config.optimizer.params) == {
        "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0,
    }  # fmt: skip
    assert config.dtype == "bf16" and config.gradient_clipping == 0.5
    assert "auto" not in str(config.to_dict())


def test_a_trainers_file_without_its_answers_names_every_key() -> None:
    with pytest.raises(ConfigError) as info:
        Config.load(_trainer())
    for path in ("bf16.enabled", "gradient_clipping", *(f"optimizer.params.{n}" for n in ("lr", "betas", "eps", "weight_decay"))):
        assert f'`{path}` is "auto", and nothing tells the value' in str(info.value)
    assert "train_batch_size`" not in str(info.value)  # it follows


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "`amp` is refused: Apex is not used"),
        ({"comms_config": {"verbose": False}}, "write `comms_logger`"),
        ({"monitor_config": {"enabled": True}}, "monitors are sections of the top level"),
        ({"seq-length": 2048}, "a setting of a model or a training script"),
        ({"weight-decay": 0.1}, "`weight_decay` belongs in `optimizer.params`"),
        ({"bf16": {"enabled": True, "hysteresis": 2}}, "needs no loss scale"),
        ({"zero_optimization": {"stage": 2, "verbose": True}}, "ZE_LOG_LEVEL"),
        ({"zero_optimization": {"stage": [0, 1, 2]}}, "a list is for a tuner"),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, "delayed updates change the result"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, 'expected one of "none", "cpu", "nvme"'),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1, "freeze_step": 4}}}, "1-bit optimizers"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1, "cuda_aware": False}}}, "only the 1-bit optimizers know it"),
        ({"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}}, "moments stay in fp32"),
        ({"optimizer": {"type": "Adam", "eps": 1e-8}}, "`eps` belongs in `optimizer.params`"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "autocast in fp16 would need a loss scale"),
        ({"curriculum_learning": {"enabled": True}}, "it changes the batches"),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, "is refused"),
        ({"zero_optimization": {"max_live_parameters": 1, "stage3_max_live_parameters": 1}}, "is another spelling of"),
        ("{train_batch_size: 8, fp16: {enabled: true}, fp16: {enabled: true}}", "`fp16` is given twice"),
        ("{train_batch_size: MICRO}", 'expected an integer of 1 or more'),
    ],
)  # fmt: skip
def test_refused_with_the_true_reason(more: dict[str, Any] | str, expected: str) -> None:
    with pytest.raises(ConfigError) as info:
        Config.load(more if isinstance(more, str) else {"train_batch_size": 8, **more})
    assert expected in str(info.value)


@pytest.mark.parametrize(
    "more",
    [
        {"amp": {"enabled": False}}, {"curriculum_learning": {"enabled": False}}, {"bf16": None},
        {"data_types": {"keep_in_fp32_modules": "auto"}}, {"zero_optimization": {"stage": 3, "reduce_bucket_size": 0}},
        {"tensorboard": {"enabled": False, "job_name": "x"}},
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "use_triton": True}}},
        {"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": True}}},
        {"zero_optimization": {"stage": "1", "allgather_bucket_size": "auto"}}, {"zero_optimization": False},
        {"autotuning": {"enabled": True, "arg_mappings": {"anything": "--flag"}}},
        {"compile": {"deepcompile": True, "passes": ["z3"]}}, {"vocabulary_size": 50257}, {"disable_python_gc": True},
    ],
)  # fmt: skip
def test_accepted_and_nothing_unread_reaches_the_engine(more: dict[str, Any]) -> None:
    config = Config.load({"train_batch_size": 8, **more})
    params = {} if config.optimizer is None else dict(config.optimizer.params)
    assert not {"use_triton", "fp32_optimizer_states"} & set(params)
    assert "'auto'" not in repr(config)
