"""transformers' Trainer through the stand-in for deepspeed: the same numbers as without an engine, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.jobs import plain_losses, run_cases
from tests.integrations.tiny import close, pretrained
from tests.ranks import run_ranks

CASES: list[dict[str, Any]] = [
    {"stage": 0, "optimizer": True, "scheduler": False},
    {"stage": 1, "optimizer": False, "scheduler": False, "model_first": True},
    {"stage": 2, "optimizer": False, "scheduler": False},
    {"stage": 3, "optimizer": True, "scheduler": False},
    {"stage": 3, "optimizer": False, "scheduler": False, "model_first": True},
    {"stage": 2, "optimizer": True, "scheduler": True},
    {"stage": 3, "optimizer": True, "scheduler": True},
    {"stage": 1, "optimizer": False, "scheduler": False, "offload": {"optimizer": "cpu"}},
    {"stage": 2, "optimizer": True, "scheduler": False, "offload": {"optimizer": "nvme"}},
    {"stage": 3, "optimizer": True, "scheduler": False, "offload": {"optimizer": "nvme", "param": "nvme"}},
    {"stage": 3, "optimizer": False, "scheduler": False, "offload": {"optimizer": "cpu", "param": "nvme"}},
]
LIKE_PLAIN = [i for i, case in enumerate(CASES) if not case["scheduler"]]  # the others have a schedule of their own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(plain_losses, 2, str(folder), str(tmp_path_factory.mktemp("plain")), timeout=120)


@pytest.fixture(scope="module")
def engines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run_ranks(run_cases, 2, str(folder), str(tmp_path_factory.mktemp("engines")), CASES, timeout=300, server="stand_in")


@pytest.mark.parametrize("case", LIKE_PLAIN, ids=lambda i: str(CASES[i]))
def test_trains_evaluates_and_generates_as_without_an_engine(
    case: int, plain: list[dict[str, Any]], engines: list[list[dict[str, Any]]]
) -> None:
    for rank in range(2):
        expected, got = plain[rank], engines[rank][case]
        if rank == 0:
            assert close(got["train"], expected["train"]), (got["train"], expected["train"])
            assert close(got["norms"], expected["norms"], 1e-4), (got["norms"], expected["norms"])
        assert close([got["eval"]], [expected["eval"]])
        assert close(got["logits"], expected["logits"], 1e-4)
        assert got["generated"] == expected["generated"]
    assert len(plain[0]["generated"]) != len(plain[1]["generated"])


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_saves_what_it_trained_and_resumes(case: int, engines: list[list[dict[str, Any]]]) -> None:
    got = engines[0][case]
    assert close(got["saved"], got["logits"], 1e-5)
    assert got["resumed"] == got["train"]  # to the last bit


def test_stages_agree_under_the_configurations_own_schedule(engines: list[list[dict[str, Any]]]) -> None:
    assert close(engines[0][5]["train"], engines[0][6]["train"], 1e-6)
    assert not close(engines[0][5]["train"], engines[0][2]["train"], 1e-3)  # it is another schedule


def test_the_best_model_comes_back_at_the_end(engines: list[list[dict[str, Any]]]) -> None:
    for results in engines:
        evals, best = results[-1]["evals"], results[-1]["best"]
        assert abs(best - min(evals)) < 1e-6 and evals[-1] > min(evals) + 0.1, (best, evals)
