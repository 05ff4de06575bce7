"""peft and trl through the stand-in: the same numbers as without an engine, and adapters that are saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.adapters import KINDS, run_adalora, run_adapters, run_trl
from tests.integrations.tiny import close, pretrained
from tests.ranks import run_ranks

PLAIN: list[dict[str, Any]] = [{"kind": kind, "stage": None} for kind in KINDS]
ENGINES: list[dict[str, Any]] = [
    {"kind": "lora", "stage": 2, "checkpointing": True},
    *({"kind": kind, "stage": 3, "checkpointing": kind in ("lora", "dora")} for kind in KINDS),
]
TRL = [("sft", None), ("sft", 2), ("sft", 3), ("dpo", None), ("dpo", 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(
        run_adapters, 2, str(folder), str(tmp_path_factory.mktemp("runs")), PLAIN + ENGINES, timeout=280, server="stand_in"
    )[0]
    return found


@pytest.mark.parametrize("case", range(len(ENGINES)), ids=lambda i: str(ENGINES[i]))
def test_an_adapter_trains_as_without_an_engine_and_is_saved_whole(case: int, trained: list[dict[str, Any]]) -> None:
    got, expected = trained[len(PLAIN) + case], trained[KINDS.index(str(ENGINES[case]["kind"]))]
    assert close(got["train"], expected["train"]), (got["train"], expected["train"])
    assert close(got["logits"], expected["logits"], 1e-4) and got["generated"] == expected["generated"]
    assert (got["trainable"], got["total"]) == (expected["trainable"], expected["total"])
    assert not got["zero"]
    assert close(got["saved"], got["logits"], 1e-5)
    if "merged" in got:
        assert close(got["merged"], got["logits"], 1e-3)


def test_an_adapter_trains_over_weights_of_four_bits(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    cases: list[dict[str, Any]] = [{"kind": "qlora", "stage": stage, "checkpointing": stage == 3} for stage in (None, 0, 1, 2, 3)]
    cases[0]["checkpointing"] = False
    expected, *engines = run_ranks(run_adapters, 2, str(folder), str(tmp_path), cases, timeout=200, server="stand_in")[0]
    for got in engines:
        assert close(got["train"], expected["train"]), (got["train"], expected["train"])
        assert close(got["logits"], expected["logits"], 1e-4) and close(got["saved"], got["logits"], 1e-5)
        assert (got["trainable"], got["total"]) == (expected["trainable"], expected["total"]) and not got["zero"]


def test_adapters_whose_ranks_follow_gradients_train_as_without_an_engine(folder: Path) -> None:
    expected, *engines = run_ranks(run_adalora, 2, str(folder), [None, 0, 1, 2, 3], timeout=120, server="stand_in")[0]
    for got in engines:
        assert close(got, expected), (got, expected)
    assert len(set(expected)) == len(expected)


def test_trl_trains_as_without_an_engine(folder: Path, tmp_path: Path) -> None:
    found = run_ranks(run_trl, 2, str(folder), str(tmp_path), TRL, timeout=200, server="stand_in")[0]
    plain = {kind: got for (kind, stage), got in zip(TRL, found, strict=True) if stage is None}
    for (kind, _), got in zip(TRL, found, strict=True):
        assert close(got["train"], plain[kind]["train"]), (kind, got["train"], plain[kind]["train"])
        assert close(got["logits"], plain[kind]["logits"], 1e-4)
