"""peft and trl through the stand-in: the same numbers as without an engine, and adapters that are saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.adapters import KINDS, run_adapters, run_sft
from tests.integrations.tiny import close, pretrained
from tests.ranks import run_ranks

PLAIN = [{"kind": kind, "stage": None} for kind in KINDS]
ENGINES = [
    {"kind": "lora", "stage": 2, "checkpointing": True},
    *({"kind": kind, "stage": 3, "checkpointing": kind in ("lora", "dora")} for kind in KINDS),
]
SFT = [2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = run_ranks(run_adapters, 2, str(folder), str(tmp_path_factory.mktemp("plain")), PLAIN, timeout=150)
    return dict(zip(KINDS, results[0], strict=True))


@pytest.fixture(scope="module")
def engines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(
        run_adapters, 2, str(folder), str(tmp_path_factory.mktemp("engines")), ENGINES, timeout=240
    )[0]
    return found


@pytest.mark.parametrize("case", range(len(ENGINES)), ids=lambda i: str(ENGINES[i]))
def test_an_adapter_trains_as_without_an_engine_and_is_saved_whole(
    case: int, plain: dict[str, dict[str, Any]], engines: list[dict[str, Any]]
) -> None:
    got, expected = engines[case], plain[str(ENGINES[case]["kind"])]
    assert close(got["train"], expected["train"]), (got["train"], expected["train"])
    assert close(got["logits"], expected["logits"], 1e-4)
    assert (got["trainable"], got["total"]) == (expected["trainable"], expected["total"])
    assert not got["zero"]
    assert close(got["saved"], got["logits"], 1e-5)
    if "merged" in got:
        assert close(got["merged"], got["logits"], 1e-3)


def test_trl_trains_completions_as_without_an_engine(folder: Path, tmp_path: Path) -> None:
    expected = run_ranks(run_sft, 2, str(folder), str(tmp_path / "plain"), [None], timeout=120)[0][0]
    for got in run_ranks(run_sft, 2, str(folder), str(tmp_path / "engine"), SFT, timeout=150)[0]:
        assert close(got["train"], expected["train"]), (got["train"], expected["train"])
        assert close(got["logits"], expected["logits"], 1e-4)
