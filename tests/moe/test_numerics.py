"""Experts on several ranks give what one process gives, at every stage and for every way of routing."""

from __future__ import annotations

import torch

from tests.moe.common import Case, distance, reference, train
from tests.ranks import run_ranks

WORST = 2e-6  # relative, after three steps


def check(world: int, cases: list[Case]) -> None:
    got = run_ranks(train, world, cases, timeout=150)
    for i, case in enumerate(cases):
        want = reference(case)
        losses = torch.tensor([[r[i]["losses"] for r in got]]).mean((0, 1))
        assert distance(losses, torch.tensor(want["losses"])) <= WORST, (case, losses, want["losses"])
        for r in got:
            assert distance(torch.tensor(r[i]["norms"]), torch.tensor(want["norms"])) <= WORST, (case, r[i]["norms"], want["norms"])
            assert r[i]["given back"].keys() == want["weights"].keys()
            for name, value in want["weights"].items():
                assert distance(r[i]["given back"][name], value) <= WORST, (case, name)
        whole = got[0][i]["weights"]
        assert whole is not None and whole.keys() == want["weights"].keys(), case
        for name, value in want["weights"].items():
            assert distance(whole[name], value) <= WORST, (case, name)


def test_two_ranks() -> None:
    uneven = (5, 2, 6, 1)
    check(2, [
        *(Case(k=k, ep=2, stage=stage, weights=uneven) for k, stage in ((1, 0), (2, 1), (4, 2), (2, 3))),
        *(Case(k=2, ep=1, stage=stage, weights=uneven) for stage in (0, 3)),
        Case(k=1, ep=2, stage=3, kind="list", weights=uneven), Case(k=2, ep=2, stage=2, kind="list"),
        Case(k=2, ep=2, stage=3, kind="gelu", accumulation=2, clip=0.1), Case(k=2, ep=2, stage=0, kind="list", accumulation=2),
        Case(k=1, ep=2, stage=1, kind="all-to-one"), Case(k=2, ep=2, stage=3, kind="starved", weights=uneven),
        Case(k=2, ep=2, stage=2, weights=(0, 0, 5, 2), clip=0.05),
    ])  # fmt: skip
