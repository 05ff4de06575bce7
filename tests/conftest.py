"""Which tests start processes, and the order of all."""

from __future__ import annotations

from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parent / "launcher"
STARTERS = ("run_ranks", "run_example", "start_example")


def starts_processes(item: pytest.Item) -> bool:
    """True for tests that start ranks: their module imports one of `STARTERS`, lies in launcher/, or says so with the marker."""
    module = getattr(item, "module", None)
    return any(hasattr(module, name) for name in STARTERS) or LAUNCHER in item.path.parents or item.get_closest_marker("ranks") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start ranks and puts them first, being the longest."""
    ranks = [item for item in items if starts_processes(item)]
    for item in ranks:
        item.add_marker("ranks")
    others = [item for item in items if item not in set(ranks)]
    items[:] = ranks + others
