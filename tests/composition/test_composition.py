"""Everything together: a model trained under any legal combination is the one that one process trains.

The default run holds every pair of levels (`space.FACTORS`); ZE_COMPOSE=all adds every triple, and 8 processes.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from tests.composition import compare, space, train
from tests.composition.cover import Cover, Row
from tests.ranks import run_ranks

pytest.importorskip("transformers")

EVERYTHING = os.environ.get("ZE_COMPOSE") == "all"
ROWS = [row for rows in space.designs(EVERYTHING) for row in rows]
EACH = 40
"""Combinations of one launch."""


@cache
def launches() -> list[list[Row]]:
    made = []
    for ranks in sorted({row["ranks"] for row in ROWS}):
        rows = [row for row in ROWS if row["ranks"] == ranks]
        made += [rows[i : i + EACH] for i in range(0, len(rows), EACH)]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


@cache
def results(number: int, folder: Path) -> dict[str, list[train.Outcome]]:
    return compare.launch(launches()[number], str(folder))


@pytest.mark.parametrize(("number", "row"), [(n, row) for n, rows in enumerate(launches()) for row in rows], ids=lambda v: _id(v))
def test_as_one_process(folder: Path, number: int, row: Row) -> None:
    wrong = compare.judge(row, results(number, folder)[space.label(row)])
    assert not wrong, f"{space.label(row)}: {wrong}"


def _id(value: object) -> str:
    return space.label(value) if isinstance(value, dict) else f"launch {value}"


@pytest.mark.parametrize("number", range(len(launches())))
def test_engines_leave_nothing_behind(folder: Path, number: int) -> None:
    """Neither threads nor process groups, file descriptors, or files of offloaded state."""
    grown = compare.left_behind(launches()[number], results(number, folder))
    assert not grown, grown


def test_what_is_covered() -> None:
    """All pairs and no row twice; what no row holds is what rules forbid or 2 and 4 processes cannot hold."""
    rows, impossible = space.pairs()
    cover = Cover(space.FACTORS, space.RULES)
    held = {part for row in rows for part in cover.within(row)}
    assert held.isdisjoint(impossible) and held | set(impossible) == set(cover.parts())
    assert len({space.label(row) for row in ROWS}) == len(ROWS)


RANDOM = [
    {"ranks": 2, "stage": 3, "sequence": "ring 2"}, {"ranks": 2, "stage": 1, "sequence": "ulysses 2"},
    {"ranks": 2, "stage": 2, "tensor": "2"}, {"ranks": 2, "stage": 3, "tensor": "2+sp"},
    {"ranks": 2, "stage": 1, "pipeline": "1f1b", "accumulation": 4}, {"ranks": 2, "stage": 3, "pipeline": "zb-v", "accumulation": 4},
]  # fmt: skip
PLAIN: Row = {name: levels[0] for name, levels in space.FACTORS.items()}


@cache
def with_dropout(folder: Path) -> list[list[train.Outcome]]:
    rows = [{**PLAIN, **row, "recompute": again} for row in RANDOM for again in ("no", "yes")]
    return run_ranks(train.run, 2, rows, str(folder), 0.3, timeout=120)


@pytest.mark.parametrize("index", range(len(RANDOM)), ids=lambda i: space.label({**PLAIN, **RANDOM[i]}))
def test_what_is_computed_again_draws_the_same_numbers(folder: Path, index: int) -> None:
    for outcomes in with_dropout(folder):
        once, again = outcomes[2 * index : 2 * index + 2]
        assert once.trained is not None and again.trained is not None, once.error + again.error
        assert once.trained.losses == again.trained.losses and once.trained.norms == again.trained.norms
