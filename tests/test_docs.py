"""What the documentation says of the tests is true: each that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
# `engine/test_steps::test_loops`, `tests/engine/test_steps.py::test_loops`
NAMED = re.compile(r"`(?:tests/)?([\w/]+?)(?:\.py)?::(test_\w+)(?:\[[^`]*\])?`")


@cache
def written_in(file: str) -> frozenset[str]:
    path = ROOT / "tests" / f"{file}.py"
    if not path.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def unknown(text: str) -> list[str]:
    return [f"{file}::{name}" for file, name in NAMED.findall(text) if name not in written_in(file)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    assert not unknown(page.read_text())


def test_the_table_of_faults_names_a_test_in_each_row() -> None:
    rows = [line for line in (ROOT / "docs" / "faults.md").read_text().splitlines() if line.startswith("| ") and "reported" not in line]
    assert len(rows) > 100 and all(NAMED.search(row) for row in rows)


def test_the_check_sees() -> None:
    assert unknown("`test_docs::test_the_check_sees` `tests/test_docs.py::test_the_check_sees[1]`") == []
    assert unknown("`engine/test_steps::test_nothing` `no/such::test_x`") == ["engine/test_steps::test_nothing", "no/such::test_x"]
