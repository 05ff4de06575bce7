"""Plans against what two ranks hold and send: the bytes are equal, not near."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner import common
from tests.ranks import run_ranks
from zeroengine.planner.plan import Plan, Planner
from zeroengine.planner.time import by_dim

AT_REST = ("parameters", "gradients", "optimizer", "disk")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(common.measured, 2, str(tmp_path_factory.mktemp("state")), timeout=180.0)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    found = {}
    for name, (kind, batch, layout) in common.LAYOUTS.items():
        made = Planner(common.source(kind), common.job(2, batch)).plan(layout)
        assert isinstance(made, Plan), made.why_not
        found[name] = made
    return found


@pytest.mark.parametrize("name", common.LAYOUTS)
def test_memory_at_rest_is_what_the_engine_holds(name: str, measured: list[dict[str, Any]], plans: dict[str, Plan]) -> None:
    for rank in plans[name].ranks:
        planned = {kind: rank.memory.kinds()[kind] for kind in AT_REST}
        assert planned == {kind: measured[rank.rank][name]["memory"][kind] for kind in AT_REST}


@pytest.mark.parametrize("name", common.LAYOUTS)
def test_bytes_of_every_collective_are_those_sent(name: str, measured: list[dict[str, Any]], plans: dict[str, Plan]) -> None:
    for rank in plans[name].ranks:
        sent = {n: float(size) for n, size in measured[rank.rank][name]["sent"].items() if by_dim({n: size})}
        assert rank.sent == sent


@pytest.mark.parametrize("name", [n for n, (_, _, layout) in common.LAYOUTS.items() if layout.pp == 1])
def test_activations_are_those_that_autograd_keeps(name: str, measured: list[dict[str, Any]], plans: dict[str, Plan]) -> None:
    planned = plans[name].ranks[0].memory.activations
    assert measured[0][name]["activations"] == pytest.approx(planned, rel=0.03)
