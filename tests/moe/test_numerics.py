"""Experts on several ranks give what one process gives, at every stage and for every way of routing."""

from __future__ import annotations

import torch

from tests.moe.common import Case, distance, reference, train
from tests.ranks import run_ranks

WORST = 2e-6  # relative, after three steps
WORST_ADAM = 1e-4  # of weights whose gradients are all rounding: Adam divides by their size


def check(world: int, cases: list[Case]) -> None:
    got = run_ranks(train, world, cases, timeout=150)
    for i, case in enumerate(cases):
        want = reference(case)
        worst = WORST if case.optimizer == "SGD" else WORST_ADAM
        losses = torch.tensor([[r[i]["losses"] for r in got]]).mean((0, 1))
        assert distance(losses, torch.tensor(want["losses"])) <= WORST, (case, losses, want["losses"])
        for r in got:
            assert distance(torch.tensor(r[i]["norms"]), torch.tensor(want["norms"])) <= WORST, (case, r[i]["norms"], want["norms"])
            assert r[i]["given back"].keys() == want["weights"].keys()
            for name, value in want["weights"].items():
                assert distance(r[i]["given back"][name], value) <= worst, (case, name)
        whole = got[0][i]["weights"]
        assert whole is not None and whole.keys() == want["weights"].keys(), case
        for name, value in want["weights"].items():
            assert distance(whole[name], value) <= worst, (case, name)


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


def drops(priority: str, **more: object) -> dict[str, object]:
    return {"drop_tokens": True, "capacity_factor": 0.6, "min_capacity": 1, "priority": priority, **more}


def test_two_ranks_that_drop_or_copy() -> None:
    uneven = (5, 2, 6, 1)
    check(2, [
        *(Case(k=k, ep=ep, stage=stage, weights=uneven, layer=drops(priority))
          for k, ep, stage, priority in ((1, 2, 3, "position"), (2, 2, 1, "position"), (2, 1, 2, "score"), (4, 2, 0, "score"),
                                         (2, 2, 3, "random"), (2, 1, 1, "random"))),
        Case(k=2, ep=2, stage=1, kind="list", layer=drops("position", use_residual=True), accumulation=2),
        Case(k=2, ep=2, stage=3, weights=uneven, config={"moe": {"copies": True}}),
        Case(k=1, ep=2, stage=2, kind="all-to-one", config={"moe": {"copies": True}}),
        Case(k=2, ep=2, stage=3, kind="list", weights=uneven, config={"moe": {"copies": True}}),
        Case(k=1, ep=2, stage=1, kind="gelu", weights=uneven, config={"moe": {"copies": True}}, optimizer="AdamW", clip=0.2),
    ])  # fmt: skip


def test_four_ranks() -> None:
    uneven = (3, 7, 1, 6)
    hybrid = {"mesh": {"ep": 2, "dp_replicate": 2}}
    check(4, [
        Case(k=2, ep=4, stage=1, weights=uneven), Case(k=2, ep=2, stage=3, weights=uneven, clip=0.1),
        Case(k=1, ep=2, stage=2, kind="list"), Case(k=4, ep=4, stage=0, kind="list", weights=uneven),
        Case(k=2, ep=2, stage=0, weights=uneven, layer=drops("position")), Case(k=2, ep=2, stage=3, weights=uneven, config=hybrid),
        Case(k=2, ep=2, stage=2, kind="list", accumulation=2, clip=0.1, config=hybrid),
        Case(k=2, ep=4, stage=3, weights=uneven, config={"moe": {"copies": True}}),
        Case(k=2, ep=4, stage=2, weights=uneven, config={"moe": {"two_hop": True, "ranks_per_node": 2}}),
        Case(k=2, ep=4, stage=1, kind="all-to-one", config={"moe": {"two_hop": True, "ranks_per_node": 2, "copies": True}}),
    ])  # fmt: skip


def test_experts_that_are_split_over_a_tensor_group() -> None:
    mesh = {"mesh": {"ep": 2, "tp": 2}}
    check(4, [
        Case(k=2, ep=2, stage=1, kind="list", config=mesh, clip=0.1),
        Case(k=1, ep=2, stage=3, kind="list", config=mesh, weights=(3, 7, 1, 6)),
        Case(k=2, stage=2, kind="list", config={"mesh": {"tp": 2}}),
    ])  # fmt: skip


def test_sixteen_bits_stay_near() -> None:
    cases = [Case(dtype="bf16", ep=2, stage=2), Case(dtype="bf16", ep=2, stage=3, kind="list"), Case(dtype="fp16", ep=2, stage=1)]
    got = run_ranks(train, 2, cases, timeout=90)
    for i, case in enumerate(cases):
        want = torch.tensor(reference(Case())["losses"] if case.kind == "bank" else reference(Case(kind="list"))["losses"])
        losses = torch.tensor([r[i]["losses"] for r in got]).mean(0)
        assert distance(losses, want) <= 0.03, (case, losses, want)
