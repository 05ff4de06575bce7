"""The generator of covering arrays."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.composition.cover import Cover, Rule

FACTORS: dict[str, Any] = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (0, 1, 2, 3)}
RULES = (
    Rule("a with d", ("a", "d"), lambda a, d: a == 3 and d > 1),
    Rule("three", ("b", "c", "d"), lambda b, c, d: b == "y" and c and d == 0),
    Rule("never", ("a", "b"), lambda a, b: a == 2 and b == "y"),
)


def legal() -> list[dict[str, Any]]:
    every = [dict(zip(FACTORS, levels, strict=True)) for levels in product(*FACTORS.values())]
    return [row for row in every if not any(rule.breaks(row) for rule in RULES)]


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_all_that_some_legal_row_holds_is_held(strength: int) -> None:
    cover = Cover(FACTORS, RULES, strength)
    rows, impossible = cover.rows()
    assert all(row in legal() for row in rows)
    held = {part for row in rows for part in cover.within(row)}
    possible = {part for row in legal() for part in cover.within(row)}
    assert held == possible and set(impossible) == set(cover.parts()) - possible


def test_few_rows() -> None:
    factors = {f"f{i}": range(3) for i in range(13)}
    rows, impossible = Cover(factors).rows()
    assert not impossible and 15 <= len(rows) <= 24  # of 1,594,323; 15 are known to do
    assert len(Cover(factors, strength=3).rows()[0]) <= 110


def test_the_same_rows_every_time() -> None:
    assert Cover(FACTORS, RULES).rows() == Cover(FACTORS, RULES).rows()


def test_rows_that_are_given_count() -> None:
    first, _ = Cover(FACTORS, RULES).rows()
    assert Cover(FACTORS, RULES).rows(first)[0] == []
    more, _ = Cover(FACTORS, RULES, 3).rows(first)
    assert 0 < len(more) < len(Cover(FACTORS, RULES, 3).rows()[0])


def test_a_strength_that_is_none() -> None:
    with pytest.raises(ValueError, match="strength 5 is not between 1 and the number of factors, 4"):
        Cover(FACTORS, strength=5)
