"""Many small scenarios in one launch of ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroengine.errors import CheckpointError


def run_scenarios(rank: int, world: int, folder: str, scenarios: tuple[Callable[[Path, int], Any], ...]) -> dict[str, str]:
    """By the scenario's name what is wrong, "" if all it returned is True. After an exception the rest is not run: ranks may be
    at different places."""
    found = {}
    for scenario in scenarios:
        try:
            result = scenario(Path(folder) / scenario.__name__.strip("_"), rank)
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
            return found
        results = result if isinstance(result, list) else [result]
        found[scenario.__name__] = "; ".join(f"{i}: {r}" for i, r in enumerate(results) if r is not True)
    return found


def error_of(call: Callable[[], Any]) -> str:
    """The text of the `CheckpointError` that `call` raises, "" if it raises none."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""
