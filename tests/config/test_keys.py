"""The table of keys: misspelt, misplaced and refused keys at every level, and the documentation made from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroengine.config import Config, describe, markdown
from zeroengine.config.spec import Kind
from zeroengine.errors import ConfigError

TABLE = Config.keys()
CLOSED = [row for row in TABLE.values() if not row.path.startswith(("optimizer.params.", "scheduler.params."))]


def _nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def _complain(written: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(written)
    return str(caught.value)


@pytest.mark.parametrize("row", CLOSED, ids=lambda row: row.path)
def test_one_wrong_letter_names_the_right_key(row) -> None:
    middle = max(1, len(row.name) // 2)
    wrong = row.name[:middle] + "q" + row.name[middle + 1 :]
    path = f"{row.parent}.{wrong}" if row.parent else wrong
    assert path not in TABLE
    text = _complain(_nested(path, 1))
    assert f"`{path}` is not a key" in text
    if len(row.name) > 3:  # of "pp" or "tp" with one letter changed too little is left
        assert f"`{row.path}`" in text


@pytest.mark.parametrize(
    "path",
    [
        row.path
        for row in CLOSED
        if row.parent and row.kind is Kind.HONOURED and row.name not in ("enabled", "dtype") and row.name not in TABLE
    ],
)
def test_a_key_at_the_top_level_by_mistake(path: str) -> None:
    name = path.rpartition(".")[2]
    value: Any = {} if TABLE[path].section else 1
    text = _complain({name: value})
    assert f"`{name}` is not a key" in text and f"`{path}`" in text


@pytest.mark.parametrize("row", [r for r in CLOSED if r.kind is Kind.HONOURED and not r.section and not r.open], ids=lambda row: row.path)
def test_a_value_of_another_type_is_an_error_that_names_the_key(row) -> None:
    for value in ([[1]], {"a": {"b": 1}}):
        text = _complain(_nested(row.path, value))
        assert f"`{row.path}" in text, text


SPELLINGS = [(spelled, row) for spelled, row in TABLE.spellings.items() if TABLE[row].kind is Kind.HONOURED]


@pytest.mark.parametrize(("spelled", "path"), SPELLINGS)
def test_another_spelling_is_the_key(spelled: str, path: str) -> None:
    """An old or second name is checked as the first is, under the name that was written."""
    value: Any = [[1]] if not TABLE[path].section else 3
    text = _complain(_nested(spelled, value))
    assert f"`{spelled}" in text and "is not a key" not in text, text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"stage": 2}, "`stage` belongs in `zero_optimization` (`zero_optimization.stage`)"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean `zero_optimization.overlap_comm`?"),
        ({"zero_optimization": {"gradient_clipping": 1}}, "`gradient_clipping` belongs in the top level"),
        ({"optimizer": {"type": "Adam", "lr": 1}}, "`lr` belongs in `optimizer.params` (`optimizer.params.lr`)"),
        ({"bf16": {"loss_scale": 0}}, "bf16 has the range of fp32 and needs no loss scale"),
        ({"max_grad_norm": 1}, "write `gradient_clipping`"),
        ({"Gradient-Clipping": 1}, "did you mean `gradient_clipping`?"),
        ({"gradient_accumulation_steps ": 1}, "did you mean `gradient_accumulation_steps`?"),
        ({"warmup_num_steps": 1}, "`scheduler.params.warmup_num_steps`"),
        ({"zero_optimization": {"stage3_param_persitance_threshold": 1}}, "stage3_param_persistence_threshold"),
        ({"tensorboard": {"enable": True}}, "`tensorboard.enabled`"),
        ({"fp16": {"fp16": True}}, "write `fp16.enabled`"),
        ({"zzz": 1}, "there is no similar key"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "write `gradient_clipping`"),
    ],
)
def test_advice(written: dict[str, Any], expected: str) -> None:
    assert expected in _complain(written)


def test_comment_keys_and_strict() -> None:
    Config.load({"_why": 1, "//": "x", "comment": "y", "x-team": {}, "zero_optimization": {"_note": "z", "stage": 1}})
    config = Config.load({"strict": False, "hidden-size": 8, "zero_optimization": {"stage": 2, "verbose": True}})
    assert config.zero_optimization.stage == 2
    assert config.to_dict()["hidden-size"] == 8
    assert "not a key" in _complain({"strict": True, "hidden-size": 8})


ON = {
    "amp": {"enabled": True}, "fp8": {"enabled": "true"}, "sparse_attention": {"mode": "fixed"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "quantize_training": {"quantize_bits": {"start_bits": 12}}, "eigenvalue": {"enabled": True},
    "progressive_layer_drop": {"enabled": True}, "curriculum_learning": {"enabled": True},
    "data_efficiency": {"enabled": True}, "torch_autocast": {"lower_precision_safe_modules": ["Linear"]},
    "zero_optimization": {"zero_quantized_gradients": True}, "bf16": {"bf16_optimizer_states": True},
    "fp16": {"fp16_master_weights_and_grads": True}, "managed_gradient_accumulation": False,
    "data_types": {"param_dtype": "bf16"}, "pipeline": {"stages": 2},
}  # fmt: skip
OFF = {
    "amp": {"enabled": False, "opt_level": "O2"}, "fp8": {"enabled": "false"}, "sparse_attention": None,
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}},
    "quantize_training": {"enabled": False}, "eigenvalue": {"enabled": False}, "progressive_layer_drop": {},
    "curriculum_learning": {"enabled": False, "min_difficulty": 8}, "data_efficiency": {"enabled": False},
    "elasticity": {"enabled": False}, "sequence_parallel_size": 1, "torch_autocast": {"enabled": False},
    "zero_optimization": {"zero_quantized_gradients": False, "zenflow": None}, "bf16": {"bf16_optimizer_states": False},
    "fp16": {"fp16_master_weights_and_grads": False}, "managed_gradient_accumulation": True,
    "data_types": {"param_dtype": None}, "pipeline": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ON)
def test_refused_only_when_switched_on(name: str) -> None:
    assert "is refused: " in _complain({name: ON[name]})
    Config.load({name: OFF[name]})


@pytest.mark.parametrize(("value", "asks"), [("true", True), (1, True), ("False", False), (0, False), ("auto", False)])
def test_words_and_numbers_for_switches(value: Any, asks: bool) -> None:
    written = {"zero_optimization": {"zero_quantized_weights": value}}
    if asks:
        assert "is refused: " in _complain(written)
    else:
        assert not Config.load(written).zero_optimization.zero_quantized_weights


@pytest.mark.parametrize("name", ["OneBitAdam", "OnebitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam"])
def test_optimizers_that_compute_something_else(name: str) -> None:
    text = _complain({"optimizer": {"type": name, "params": {"lr": 1e-3, "freeze_step": 4}}})
    assert f'`optimizer.type` is "{name}"' in text
    (report,) = [r for r in describe({"optimizer": {"type": name}}) if r.path == "optimizer.type"]
    assert report.kind == "refused"


def test_every_row_is_documented_and_has_a_reason() -> None:
    for row in TABLE.values():
        assert row.meaning or row.parent, row.path
        assert row.reason or row.kind is Kind.HONOURED, row.path
        assert row.path.count(".") == 0 or row.parent in TABLE or row.parent.rpartition(".")[0] in TABLE, row.path


def test_documentation_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == markdown(TABLE)


def test_describe() -> None:
    reports = {report.path: report for report in describe({
        "_note": 1, "train_batch_size": "x", "gradient_clipping": "auto", "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_com": True, "allgather_bucket_size": 7, "cpu_offload": True},
        "amp": {"enabled": True}, "wandb": {"enabled": False}, "optimizer": {"type": "SGD", "params": {"lr": 1}},
    })}  # fmt: skip
    kinds = {path: report.kind for path, report in reports.items()}
    assert kinds == {
        "_note": "comment", "train_batch_size": "invalid", "gradient_clipping": "auto", "bfloat16.enabled": "honoured",
        "zero_optimization.stage": "honoured", "zero_optimization.overlap_com": "unknown",
        "zero_optimization.allgather_bucket_size": "ignored", "zero_optimization.cpu_offload": "honoured",
        "amp": "refused", "wandb.enabled": "honoured", "optimizer.type": "honoured", "optimizer.params.lr": "honoured",
    }  # fmt: skip
    assert reports["zero_optimization.stage"].value == 2
    assert "overlap_comm" in reports["zero_optimization.overlap_com"].text
