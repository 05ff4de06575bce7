"""Experts on several ranks give what one process gives, at every stage and for every way of routing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from tests.moe.common import Case, distance, reference, train
from tests.ranks import run_ranks
from zeroengine.moe import Capacity, RouterRule

WORST = 2e-6  # relative, after three steps
FIRST = 1e-6  # relative, of the first step
WORST_ADAM = 1e-4  # of weights whose gradients are all rounding: Adam divides by their size


def drops(priority: str, **more: object) -> dict[str, object]:
    return {"drop_tokens": True, "capacity_factor": 0.6, "min_capacity": 1, "priority": priority, **more}


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


def check_first_step(world: int, cases: list[Case]) -> None:
    """Loss and every gradient of one step."""
    got = run_ranks(train, world, cases, 1, timeout=170)
    known: dict[str, dict[str, Any]] = {}
    for i, case in enumerate(cases):
        alike = str(replace(case, ep=1, stage=0, config={}))
        if alike not in known:
            known[alike] = reference(case, 1)
        want = known[alike]
        losses = torch.tensor([r[i]["losses"] for r in got]).mean(0)
        assert distance(losses, torch.tensor(want["losses"])) <= FIRST, (case, losses, want["losses"])
        seen = set()
        for r in got:
            for name, grad in r[i]["grads"].items():
                seen.add(name)
                assert distance(grad, want["grads"][name]) <= FIRST, (case, name, distance(grad, want["grads"][name]))
        assert seen == want["grads"].keys(), case


def test_every_degree_stage_k_and_drop_on_four_ranks() -> None:
    weights = [(5, 5, 5, 5), (3, 7, 1, 6), (0, 4, 9, 2), (8, 0, 0, 1)]
    kinds = ["bank", "list", "gelu", "starved", "all-to-one"]
    grid = itertools.product((1, 2, 4), (0, 1, 2, 3), (1, 2, 4), ({}, drops("position")))
    check_first_step(4, [
        Case(k=k, ep=ep, stage=stage, layer=layer, weights=weights[(i + i // 4) % 4], kind=kinds[i % 5])
        for i, (ep, stage, k, layer) in enumerate(grid)
    ])  # fmt: skip


def test_three_ranks() -> None:
    weights = [(5, 2, 6), (0, 7, 1), (9, 0, 0)]
    grid = itertools.product((1, 3), (0, 1, 2, 3), ({}, drops("score")))
    check_first_step(3, [
        Case(k=2 + i % 2, ep=ep, stage=stage, layer=layer, weights=weights[i % 3], experts=6, kind=("bank", "list")[i // 2 % 2],
             config={"moe": {"copies": True}} if ep == 3 and i % 4 < 2 else {})
        for i, (ep, stage, layer) in enumerate(grid)
    ])  # fmt: skip


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
        *(Case(ep=2, stage=stage, kind=kind, weights=weights, recompute=True, accumulation=2, clip=0.1, layer=layer, config=config)
          for stage, kind, weights, layer, config in (
              (1, "bank", uneven, {}, {}), (3, "list", uneven, {}, {}), (3, "bank", (0, 0, 5, 2), {}, {"moe": {"copies": True}}),
              (2, "bank", uneven, drops("random"), {}), (0, "list", uneven, drops("score"), {}))),
    ])  # fmt: skip


def test_routers_of_every_kind() -> None:
    """Sigmoid scores, groups, both losses, and a bias that moves after each step."""
    kinds: list[dict[str, Any]] = [
        {"k": 2, "score": "sigmoid", "normalize": True, "scale": 2.5, "groups": 2, "top_groups": 1, "bias_speed": 0.05, "z_weight": 0.02},
        {"k": 1, "score": "sigmoid", "aux_weight": 0.0, "bias_speed": 0.1}, {"k": 3, "z_weight": 0.1, "aux_weight": 0.5},
        {"k": 2, "normalize": True, "capacity": Capacity(0.7, 0.7, 1, "score"), "bias_speed": 0.05},
    ]  # fmt: skip
    check(2, [
        Case(ep=1 + i % 2, stage=(1, 3, 0, 2)[i % 4], weights=(5, 2, 6, 1), accumulation=1 + i // 4, layer={"rule": RouterRule(**kind)})
        for i, kind in enumerate(kinds * 2)
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
    uneven = (5, 2, 6, 1)
    cases = [
        Case(dtype="bf16", ep=2, stage=2), Case(dtype="bf16", ep=2, stage=3, kind="list"), Case(dtype="fp16", ep=2, stage=1),
        Case(dtype="bf16", ep=2, stage=3, weights=(0, 0, 5, 2), config={"moe": {"copies": True, "dispatch_dtype": "fp8"}}),
        Case(dtype="fp16", ep=2, stage=2, kind="gelu", weights=uneven, recompute=True, config={"moe": {"dispatch_dtype": "bf16"}}),
        Case(ep=2, stage=3, weights=uneven, accumulation=2, config={"moe": {"dispatch_dtype": "fp8"}}),
    ]  # fmt: skip
    got = run_ranks(train, 2, cases, timeout=90)
    for i, case in enumerate(cases):
        want = torch.tensor(reference(replace(case, dtype="fp32"))["losses"])
        losses = torch.tensor([r[i]["losses"] for r in got]).mean(0)
        assert distance(losses, want) <= 0.03, (case, losses, want)
