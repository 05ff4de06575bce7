"""What cannot be combined is refused on all ranks, with the reason and the remedy, and the model is what it was."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.composition.refusals import CASES, Refused, refuse
from tests.ranks import run_ranks

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


@cache
def results(ranks: int, folder: Path) -> dict[str, list[Refused]]:
    names = [name for name, case in CASES.items() if case.ranks == ranks]
    found = run_ranks(refuse, ranks, names, str(folder), timeout=150)
    return {name: [rank[i] for rank in found] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_the_reason(folder: Path, name: str) -> None:
    case = CASES[name]
    for refused in results(case.ranks, folder)[name]:
        assert refused.kind in ("ConfigError", "ModelError", "ScheduleError"), refused
        assert case.reason in refused.text and case.remedy in refused.text, refused.text
        assert not refused.again, refused.again
        assert refused.after == refused.before, "something is left of the engine that was not made"
