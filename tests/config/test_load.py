"""Values: what is written becomes what the engine reads."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from zeroengine.config import Config, FrozenMap
from zeroengine.errors import ConfigError

FULL = """
train_batch_size: 32   # brace-less, with comments
"train_micro_batch_size_per_gpu": "4",
"steps_per_print": Infinity,
"gradient_clipping": 1,
"bfloat16": {"enabled": True},
"communication_data_type": "torch.bfloat16",
"gradient_allreduce_op": "SUM",
"optimizer": {"type": "adamw", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
"zero_optimization": {
    "stage": "3",
    "reduce_bucket_size": 5e8,
    "max_live_parameters": 8.3e7,
    "stage3_gather_fp16_weights_on_model_save": true,
    "offload_optimizer": {"device": "CPU", "nvme_path": null},
    "offload_param": null,
    "mics_shard_size": -1,
},
"mesh": {"tp": 2}, "health": {"comm_timeout": 5},
"""


def test_values_and_spellings() -> None:
    config = Config.load(FULL)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (32, 4)
    assert config.steps_per_print is None and config.gradient_clipping == 1.0
    assert config.dtype == "bf16" and config.bf16.enabled and not config.fp16.enabled
    assert config.communication_data_type == "bf16" and config.gradient_reduction == "sum"
    assert config.optimizer is not None and config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.95)}
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.stage3_max_live_parameters) == (3, 500_000_000, 83_000_000)
    assert isinstance(zero.reduce_bucket_size, int)
    assert zero.stage3_gather_16bit_weights_on_model_save and zero.mics_shard_size is None
    assert zero.offload_optimizer.device == "cpu" and zero.offload_param.device == "none"
    assert config.mesh.tp == 2 and config.mesh.dp_shard is None
    assert (config.health.comm_timeout, config.health.stall_timeout) == (5.0, 600.0)


def test_defaults() -> None:
    config = Config.load({})
    zero = config.zero_optimization
    assert (zero.stage, zero.bucket_size, zero.reduce_bucket_size) == (0, None, 500_000_000)
    assert (zero.stage3_param_persistence_threshold, zero.stage3_prefetch_bucket_size) == (0, None)
    assert (zero.stage3_max_reuse_distance, zero.stage3_max_live_parameters) == (0, 10**9)
    assert config.gradient_reduction == "mean" and config.gradient_clipping == 0.0 and config.dtype == "fp32"
    assert (config.health.comm_timeout, config.steps_per_print) == (10.0, 10)
    assert config.optimizer is None and config.scheduler is None
    assert Config().model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("written", "stage", "device"),
    [
        ({"zero_optimization": True}, 1, "none"),
        ({"zero_optimization": False}, 0, "none"),
        ({"zero_optimization": None}, 0, "none"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 2, "cpu"),
        ({"zero_optimization": {"stage": 2.0, "cpu_offload": "false"}}, 2, "none"),
    ],
)
def test_old_forms(written: dict[str, Any], stage: int, device: str) -> None:
    zero = Config.load(written).zero_optimization
    assert (zero.stage, zero.offload_optimizer.device) == (stage, device)


def test_old_param_offload_and_tensor_parallel() -> None:
    zero = Config.load({"zero_optimization": {"cpu_offload_param": True}}).zero_optimization
    assert (zero.offload_param.device, zero.offload_optimizer.device) == ("cpu", "none")
    assert Config.load({"tensor_parallel": {"autotp_size": "4"}}).mesh.tp == 4
    assert Config.load({"tensor_parallel": {"autotp_size": 4}, "mesh": {"tp": 4}}).mesh.tp == 4
    assert Config.load({"tensor_parallel": {"autotp_size": 1}, "mesh": {"tp": 2}}).mesh.tp == 2


ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("written", "path", "expected"),
    [
        ({"train_batch_size": 1.5}, "train_batch_size", "1.5: expected an integer of 1 or more"),
        ({"train_batch_size": True}, "train_batch_size", "true: expected an integer"),
        ({"train_batch_size": 0}, "train_batch_size", "expected an integer of 1 or more"),
        ({"train_batch_size": "MB_SIZE"}, "train_batch_size", '"MB_SIZE": expected an integer'),
        ({"gradient_clipping": "none"}, "gradient_clipping", "expected a finite number of 0 or more"),
        ({"gradient_clipping": math.inf}, "gradient_clipping", "expected a finite number"),
        ({"steps_per_print": 0}, "steps_per_print", "null or Infinity for never"),
        ({ZERO: {"stage": [2, 3]}}, "zero_optimization.stage", "a list is for a tuner"),
        ({ZERO: {"stage": 4}}, "zero_optimization.stage", "expected 0, 1, 2 or 3"),
        ({ZERO: {"overlap_comm": 2}}, "zero_optimization.overlap_comm", "expected true or false"),
        ({ZERO: {"offload_param": {"device": "gpu"}}}, f"{ZERO}.offload_param.device", '"none", "cpu", "nvme"'),
        ({ZERO: 3}, "zero_optimization", "expected an object"),
        ({"fp16": True}, "fp16", "expected an object"),
        ({"bfloat16": {"enabled": "yes"}}, "bfloat16.enabled", "expected true or false"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale", "0 or more"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "data_types.grad_accum_dtype", '"fp32", "fp16", "bf16"'),
        ({"checkpoint": {"tag_validation": "maybe"}}, "checkpoint.tag_validation", '"Ignore", "Warn", "Fail"'),
        ({"optimizer": {}}, "optimizer.type", "is required"),
        ({"optimizer": {"type": "Addam"}}, "optimizer.type", "did you mean `Adam`?"),
        ({"scheduler": {"type": "WarmupLr2"}}, "scheduler.type", "did you mean `WarmupLR`?"),
        ({"optimizer": {"type": "SGD", "params": [1]}}, "optimizer.params", "expected an object"),
        ({"health": {"comm_timeout": 700}}, "health", "shorter than comm_timeout"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "", "both true"),
        ({ZERO: {"cpu_offload": True, "offload_optimizer": {"device": "none"}}}, f"{ZERO}.cpu_offload", "old form"),
        ({ZERO: {"cpu_offload": "maybe"}}, "zero_optimization.cpu_offload", "expected true or false"),
        ({ZERO: {"max_live_parameters": 1, "stage3_max_live_parameters": 1}}, f"{ZERO}.stage3_max_live_parameters",
         "another spelling of `zero_optimization.max_live_parameters`"),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16", "another spelling of `bf16`"),
        ({"tensor_parallel": {"autotp_size": 2}, "mesh": {"tp": 4}}, "tensor_parallel.autotp_size", "`mesh.tp` is 4"),
    ],
)  # fmt: skip
def test_wrong_values(written: dict[str, Any], path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(written)
    text = str(caught.value)
    assert f"`{path}`" in text or not path, text
    assert expected in text


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({
            "train_batch_size": "x", "zero_optimizaton": {}, "amp": {"enabled": True}, "gradient_clipping": "auto",
        })  # fmt: skip
    for part in ("4 problems", "train_batch_size", "zero_optimization", "amp", "gradient_clipping"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["Adam", "adamw", "SGD", "lamb", "Lion", "ADAGRAD", "muon", "Adafactor", "RMSprop", "rmsprop", "NAdam"])
def test_optimizer_names(name: str) -> None:
    section = Config.load({"optimizer": {"type": name}}).optimizer
    assert section is not None and section.type.lower() == name.lower()
    assert section.type in ("Adam", "AdamW", "SGD", "Lamb", "Lion", "Adagrad", "Muon", "Adafactor", "RMSprop", "NAdam")


def test_torch_schedule_names() -> None:
    section = Config.load({"scheduler": {"type": "cosineannealinglr", "params": {"T_max": 5}}}).scheduler
    assert section is not None and section.type == "CosineAnnealingLR"


def test_frozen_and_picklable() -> None:
    config = Config.load(FULL)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        config.train_batch_size = 1  # type: ignore[misc]
    with pytest.raises((TypeError, ValueError, AttributeError)):
        config.zero_optimization.stage = 1  # type: ignore[misc]
    assert config.optimizer is not None
    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        config.optimizer.params._items = {}
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.to_dict() == config.to_dict()
    assert copy.deepcopy(config) == config
    assert isinstance(again.optimizer.params, FrozenMap)


def test_to_dict_is_what_was_written() -> None:
    written: dict[str, Any] = {"_comment": "mine", "train_batch_size": "8", "bfloat16": {"enabled": True}}
    config = Config.load(written)
    given = config.to_dict()
    assert given == written
    given["bfloat16"]["enabled"] = False
    assert config.to_dict() == written and written["bfloat16"] == {"enabled": True}
    assert Config.load(config) is config
    assert Config(train_batch_size=4, optimizer={"type": "SGD", "params": {"lr": [1, {"a": 2}]}}).to_dict() == {  # type: ignore[arg-type]
        "train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": [1, {"a": 2}]}},
    }  # fmt: skip


def test_the_caller_keeps_its_dict() -> None:
    written = {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}, "zero_optimization": {"cpu_offload": True}}
    before = copy.deepcopy(written)
    Config.load(written)
    assert written == before


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the package's logger says meanwhile."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    yield messages
    logging.getLogger("zeroengine").removeHandler(handler)


def test_one_warning_names_all_that_is_ignored(said: list[str]) -> None:
    written = {
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
        "nebula": {"enabled": False},
        "zero_optimization": {"allgather_bucket_size": 2e8, "contiguous_gradients": True, "reduce_scatter": False},
        "compile": {"deepcompile": True},
    }
    Config.load(written)
    assert len(said) == 1
    text = said[0]
    zero = "zero_optimization"
    for path in ("hybrid_engine", f"{zero}.allgather_bucket_size", f"{zero}.reduce_scatter", "compile"):
        assert f"`{path}`" in text
    for path in ("nebula", "contiguous_gradients", "max_out_tokens"):
        assert path not in text


def test_nothing_is_said_about_a_plain_configuration(said: list[str]) -> None:
    Config.load({"train_batch_size": 3, "zero_optimization": {"stage": 2, "allgather_partitions": True}})
    assert not said
