"""Our own experts in models whose layers, and sequences between them, ranks split: all as in one process."""

from __future__ import annotations

import torch

from tests.moe.common import distance
from tests.moe.split_models import Split, reference, train
from tests.ranks import run_ranks

WORST = 5e-6


def check(world: int, cases: list[Split]) -> None:
    got = run_ranks(train, world, cases, timeout=150)
    for i, case in enumerate(cases):
        want = reference(case)
        losses = torch.tensor([r[i]["losses"] for r in got]).mean(0)
        assert distance(losses, torch.tensor(want["losses"])) <= WORST, (case, losses, want["losses"])
        for r in got:
            assert distance(torch.tensor(r[i]["norms"]), torch.tensor(want["norms"])) <= WORST, (case, r[i]["norms"], want["norms"])
            assert r[i]["back"].keys() == want["weights"].keys()
            for name, value in want["weights"].items():
                assert distance(r[i]["back"][name], value) <= WORST, (case, name)
        for name, value in want["weights"].items():
            assert distance(got[0][i]["whole"][name], value) <= WORST, (case, name)
        if case.kind == "bank":  # cut by the ranks that split layers, unless each of them has other tokens
            ways = case.mesh.get("ep", 1) * (1 if case.sp else case.mesh["tp"])
            every = sum(v.numel() for n, v in want["weights"].items() if "experts" in n)
            assert {r[i]["held"] * ways for r in got} == {every}, case


def drops(priority: str) -> dict[str, object]:
    return {"drop_tokens": True, "capacity_factor": 0.6, "min_capacity": 1, "priority": priority}


def test_layers_split_over_two_ranks() -> None:
    tp = {"tp": 2}
    check(2, [
        Split("bank", tp), Split("list", tp, stage=3), Split("gelu", tp, stage=2), Split("bank", tp, layer=drops("position")),
        Split("list", tp, layer={**drops("score"), "use_residual": True}), Split("bank", tp, layer=drops("score"), stage=3),
    ])  # fmt: skip


def test_sequences_split_between_the_layers() -> None:
    tp = {"tp": 2}
    check(2, [
        Split("bank", tp, sp=True), Split("list", tp, sp=True, stage=3), Split("gelu", tp, sp=True, stage=2),
        Split("list", tp, sp=True, layer={"use_residual": True}),
    ])  # fmt: skip


def test_split_layers_and_shared_experts() -> None:
    both, copies = {"tp": 2, "ep": 2}, {"moe": {"copies": True}}
    check(4, [
        Split("bank", both), Split("list", both, stage=3), Split("bank", both, sp=True), Split("gelu", both, sp=True, stage=3),
        Split("list", both, sp=True, stage=2), Split("bank", both, sp=True, config=copies), Split("list", both, config=copies),
        Split("bank", both, layer=drops("position"), stage=2), Split("bank", {"tp": 2, "dp_replicate": 2}, sp=True),
    ])  # fmt: skip
