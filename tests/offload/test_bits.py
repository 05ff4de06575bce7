"""Training with state and values elsewhere gives the bits of training without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.offload.runs import Plan, Run, difference, run_all
from tests.ranks import run_ranks

CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
SMALL = {"device": "nvme", "buffer_count": 2}  # fewer buffers than buckets: everything passes through them


def compare(world: int, folder: Path, pairs: list[tuple[Plan, list[Plan]]], env: dict[str, str] | None = None) -> list[list[Run]]:
    plans = [p for plain, others in pairs for p in (plain, *others)]
    results = run_ranks(run_all, world, plans, str(folder), timeout=200, env=env)
    for runs in results:
        at = iter(runs)
        for _, others in pairs:
            expected = next(at)
            for other in others:
                got = next(at)
                assert not (told := difference(expected, got)), f"{other}: {told}"
                on_disk = "nvme" in str(other.state) + str(other.values)
                assert (got.moved["written"] > 0) is on_disk, other
    return results


def places(stage: int, **fixed: Any) -> tuple[Plan, list[Plan]]:
    """A plan without offload, and the ways to offload at that stage."""
    others: list[tuple[Any, Any]] = [(CPU, None), (SMALL, None)]
    if stage == 3:
        others += [(None, SMALL), (SMALL, SMALL)]
    return Plan(stage, **fixed), [Plan(stage, state, values, **fixed) for state, values in others]


@pytest.mark.parametrize("world", [2, 4])
def test_stages_and_types(world: int, tmp_path: Path) -> None:
    clipped = {"gradient_clipping": 0.5}
    pairs = [places(stage, dtype=dtype, changes=clipped) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
    compare(world, tmp_path, pairs)
