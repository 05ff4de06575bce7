"""Muon makes each expert's matrix orthogonal by itself, wherever the experts are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.moe.common import Case, build, distance, tokens, train
from tests.moe.test_checkpoint import _load, _save
from tests.ranks import run_ranks

NEAR = 4e-3  # relative: the iteration runs in bf16, in which rounding that differs by a bit shows


def _reference(case: Case, steps: int, whole_banks: bool = False) -> dict[str, torch.Tensor]:
    """torch's Muon over every matrix of every expert, torch's AdamW over the rest; `whole_banks`: over stacks as one matrix."""
    model = build(case)
    matrices: list[tuple[nn.Parameter, nn.Parameter, int | None]] = []
    vectors = []
    for name, p in model.named_parameters():
        stacked = "experts" in name and case.kind != "list"
        if p.dim() == 3 and whole_banks:
            matrices.append((nn.Parameter(p.data.view(p.shape[0], -1)), p, None))
        elif p.dim() == 3:
            matrices += [(nn.Parameter(p.data[e]), p, e) for e in range(p.shape[0])]
        elif p.dim() == 2 and not stacked:
            matrices.append((nn.Parameter(p.data), p, None))
        else:
            vectors.append(p)
    muon = torch.optim.Muon([m for m, _, _ in matrices], lr=0.05, weight_decay=0.0)
    adam = torch.optim.AdamW(vectors, lr=0.05, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(steps):
        x, y = tokens(case, step, 0)
        model(x, y, torch.tensor(1 / len(x))).backward()
        for matrix, p, e in matrices:
            assert p.grad is not None
            matrix.grad = p.grad.view(matrix.shape) if e is None else p.grad[e]
        muon.step()
        adam.step()
        model.zero_grad()
    return {n: v.clone() for n, v in model.state_dict().items()}


def test_every_expert_has_a_matrix_of_its_own() -> None:
    runs = [(1, 0, "bank"), (1, 2, "bank"), (2, 0, "bank"), (2, 1, "bank"), (2, 3, "bank"), (2, 2, "gelu"), (2, 1, "list")]
    cases = [Case(ep=ep, stage=stage, kind=kind, optimizer="Muon") for ep, stage, kind in runs]
    got = run_ranks(train, 2, cases, 2, timeout=120)
    for i, case in enumerate(cases):
        want = _reference(case, 2)
        for r in got:
            for name, value in want.items():
                if not name.endswith("bias"):  # Adam divides the rounding of a bias's gradient by its size
                    assert distance(r[i]["given back"][name], value) <= NEAR, (case, name, distance(r[i]["given back"][name], value))
    name = "moe.sparse.experts.down_proj"
    other = _reference(cases[0], 2, whole_banks=True)[name]
    assert distance(got[0][0]["given back"][name], other) > 10 * NEAR


def test_its_momentum_is_saved_and_loads_at_another_degree(tmp_path: Path) -> None:
    went_on = run_ranks(_save, 2, str(tmp_path), [Case(ep=2, stage=2, optimizer="Muon"), Case(ep=1, stage=1, optimizer="Muon")], timeout=90)
    others = [(0, Case(ep=1, stage=3, optimizer="Muon")), (1, Case(ep=2, stage=0, optimizer="Muon"))]
    got = run_ranks(_load, 2, str(tmp_path), others, timeout=90)
    for at, (i, case) in enumerate(others):
        losses, want = torch.tensor([r[at] for r in got]).mean(0), torch.tensor([r[i] for r in went_on]).mean(0)
        assert distance(losses, want) <= NEAR, (case, losses, want)
