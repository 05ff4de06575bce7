"""Checkpoints name every expert once and load at any number of ranks that share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.moe.common import Case, build, cut, distance, reference, settings, tokens
from tests.ranks import run_ranks
from zeroengine.checkpoint import SavedCheckpoint
from zeroengine.errors import ConfigError


def _steps(engine: Any, case: Case, rank: int, world: int, first: int, number: int) -> list[float]:
    losses = []
    for step in range(first, first + number):
        x, y = tokens(case, step, 0)
        mine = cut(case, world, rank)
        loss = engine(x[mine], y[mine], torch.tensor(world / len(x)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _save(rank: int, world: int, folder: str, cases: list[Case]) -> list[list[float]]:
    import zeroengine

    found = []
    for i, case in enumerate(cases):
        engine, *_ = zeroengine.initialize(model=build(case), config=settings(case))
        _steps(engine, case, rank, world, 0, 2)
        engine.save_checkpoint(f"{folder}/{i}")
        found.append(_steps(engine, case, rank, world, 2, 2))
        engine.destroy()
    return found


def _load(rank: int, world: int, folder: str, cases: list[tuple[int, Case]]) -> list[list[float]]:
    import zeroengine

    found = []
    for i, case in cases:
        torch.manual_seed(99)
        model = build(case)
        for p in model.parameters():
            p.data.fill_(7.0)
        engine, *_ = zeroengine.initialize(model=model, config=settings(case))
        path, _ = engine.load_checkpoint(f"{folder}/{i}")
        assert path is not None
        found.append(_steps(engine, case, rank, world, 2, 2))
        engine.destroy()
    return found


def test_a_run_goes_on_at_another_degree(tmp_path: Path) -> None:
    saved = [
        Case(ep=2, stage=2, optimizer="AdamW"), Case(ep=2, stage=3, kind="list", optimizer="AdamW"), Case(ep=1, stage=1, optimizer="AdamW"),
    ]  # fmt: skip
    went_on = run_ranks(_save, 2, str(tmp_path), saved, timeout=120)
    others = [
        (0, Case(ep=1, stage=3, optimizer="AdamW")), (0, Case(ep=2, stage=1, optimizer="AdamW")),
        (1, Case(ep=1, stage=0, kind="list", optimizer="AdamW")), (1, Case(ep=2, stage=3, kind="list", optimizer="AdamW")),
        (2, Case(ep=2, stage=3, optimizer="AdamW")),
    ]  # fmt: skip
    for world, cases in ((2, others), (1, [o for o in others if o[1].ep == 1])):
        got = run_ranks(_load, world, str(tmp_path), cases, timeout=120)
        for at, (i, case) in enumerate(cases):
            losses = torch.tensor([r[at] for r in got]).mean(0)
            want = torch.tensor([r[i] for r in went_on]).mean(0)
            assert distance(losses, want) <= 2e-6, (world, i, case, losses, want)


def _hand_on(rank: int, world: int, source: str | None, target: str, case: Case, first: int) -> list[float]:
    """Loads, trains two steps and saves."""
    import zeroengine

    model = build(case)
    if source is not None:
        for p in model.parameters():
            p.data.fill_(7.0)
    engine, *_ = zeroengine.initialize(model=model, config=settings(case))
    if source is not None:
        engine.load_checkpoint(source)
    losses = _steps(engine, case, rank, world, first, 2)
    engine.save_checkpoint(target)
    engine.destroy()
    return losses


@pytest.mark.parametrize("kind", ["bank", "list"])
def test_four_ranks_then_one_then_two_with_copies_of_busy_experts(kind: str, tmp_path: Path) -> None:
    copies = {"moe": {"copies": True}}
    losses: list[float] = []
    for i, (world, stage) in enumerate(((4, 3), (1, 0), (2, 2))):
        case = Case(ep=world, stage=stage, kind=kind, config=copies, optimizer="AdamW", weights=(3, 7, 1, 6))
        source = str(tmp_path / str(i - 1)) if i else None
        got = run_ranks(_hand_on, world, source, str(tmp_path / str(i)), case, 2 * i, timeout=60)
        losses += torch.tensor(got).mean(0).tolist()
    want = reference(Case(kind=kind, optimizer="AdamW", weights=(3, 7, 1, 6)), 6)["losses"]
    assert distance(torch.tensor(losses), torch.tensor(want)) <= 1e-5, (losses, want)


def test_moments_of_experts_are_those_of_a_run_that_never_shared_them(tmp_path: Path) -> None:
    """Weights, masters and both moments of every expert, for experts in one tensor and in a list."""
    cases = [Case(ep=ep, stage=stage, kind=kind, optimizer="AdamW") for kind, stage in (("bank", 1), ("list", 3)) for ep in (1, 2)]
    run_ranks(_save, 2, str(tmp_path), cases, timeout=100)
    for i in (0, 2):
        alone, shared = SavedCheckpoint(tmp_path / str(i)), SavedCheckpoint(tmp_path / str(i + 1))
        assert alone.index.keys() == shared.index.keys()
        moments = [k for k in alone.index if "experts" in k and "exp_avg" in k]
        assert len(moments) >= 4
        for key in alone.index:
            assert distance(shared.read(key), alone.read(key)) <= (1e-5 if "exp_avg" in key else 1e-4), (cases[i], key)


def _constants(rank: int, world: int, folder: str, kind: str) -> dict[str, Any]:
    import zeroengine

    case = Case(ep=2, stage=1, kind=kind)
    model = build(case)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" in name and kind == "bank":
                p.copy_(torch.arange(4.0).view(4, *[1] * (p.dim() - 1)).expand_as(p))
            elif "experts" in name:
                p.fill_(float(name.split("experts.")[1].split(".")[0]))
    whole = {n: v.clone() for n, v in model.state_dict().items()}
    engine, *_ = zeroengine.initialize(model=model, config=settings(case))
    engine.save_checkpoint(f"{folder}/{kind}", tag="one")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(whole if kind == "bank" else {n: v for n, v in whole.items()})
    mine = {}
    for name, p in model.named_parameters():
        if "experts" in name:
            mine[name] = p.detach().flatten(1).mean(1).tolist() if kind == "bank" else [float(p.detach().mean())]
    again = engine.full_state_dict()
    same = again is None or all(torch.equal(again[n], v) for n, v in whole.items())
    engine.destroy()
    return {"mine": mine, "same": same}


@pytest.mark.parametrize("kind", ["bank", "list"])
def test_every_rank_saves_and_loads_its_own_experts(kind: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    got = run_ranks(_constants, 2, str(tmp_path), kind, timeout=60)
    keys = FileSystemReader(tmp_path / kind / "one").read_metadata().state_dict_metadata
    experts = {k: v for k, v in keys.items() if k.startswith("model.moe.sparse.experts.")}
    if kind == "bank":
        assert {tuple(v.size)[0] for v in experts.values()} == {4}
    else:
        assert {k.split("experts.")[1].split(".")[0] for k in experts} == {"0", "1", "2", "3"}
    for rank, found in enumerate(got):
        assert found["same"]
        for name, values in found["mine"].items():
            want = [2.0 * rank, 2.0 * rank + 1] if kind == "bank" else [float(name.split("experts.")[1].split(".")[0])]
            assert values == want, (rank, name)
            assert kind == "bank" or int(want[0]) // 2 == rank


def _refused(rank: int, world: int) -> list[str]:
    import zeroengine
    from zeroengine.errors import ModelError

    texts = []
    for case, error in (
        (Case(ep=2, optimizer="Adafactor"), ConfigError), (Case(ep=2, config={"mesh": {"ep": 3}}), ConfigError),
        (Case(ep=2, layer={"ep_size": 4}), ConfigError), (None, ModelError),
    ):  # fmt: skip
        model = torch.nn.Linear(4, 4) if case is None else build(case)
        before = [n for n, _ in model.named_parameters()]
        try:
            zeroengine.initialize(model=model, config=settings(case or Case(ep=2)))
            texts.append("accepted")
        except error as exc:
            texts.append(str(exc))
        assert before == [n for n, _ in model.named_parameters()] and all(p.shape[0] != 2 or p.numel() < 20 for p in model.parameters())
    return texts


def test_what_cannot_be_is_refused_with_a_reason() -> None:
    for texts in run_ranks(_refused, 2, timeout=60):
        assert "Adafactor looks at whole parameters" in texts[0]
        assert "does not divide" in texts[1] and "ep_size 4" in texts[2] and "no layers with experts" in texts[3]


def _declared(rank: int, world: int) -> tuple[int, float]:
    import zeroengine

    case = Case(ep=1, layer={"ep_size": 2})
    engine, *_ = zeroengine.initialize(model=build(case), config=settings(case))
    x, y = tokens(case, 0, 0)
    mine = cut(case, world, rank)
    loss = engine(x[mine], y[mine], torch.tensor(world / len(x)))
    return engine.experts.group.size, float(loss.detach())


def test_a_layer_may_say_how_many_ranks_share_it() -> None:
    got = run_ranks(_declared, 2, timeout=60)
    x, y = tokens(Case(), 0, 0)
    want = float(build(Case())(x, y, torch.tensor(1 / len(x))).detach())
    assert all(size == 2 for size, _ in got) and abs(sum(loss for _, loss in got) / 2 - want) < 1e-6


def _frozen(rank: int, world: int, folder: str, background: bool) -> bool:
    """Frozen experts, which no bucket cuts at stage 1: the ranks that hold one save it together, here one rank each."""
    import zeroengine

    def made(ep: int) -> Any:
        case = Case(ep=ep, stage=1, kind="list")
        model = build(case)
        experts = model.moe.sparse.experts
        for i in range(4):
            experts.get_submodule(str(i)).requires_grad_(False)
        return zeroengine.initialize(model=model, config=settings(case))[0]

    engine = made(ep=2)
    want = engine.full_state_dict()
    engine.save_checkpoint(folder, blocking=not background)
    engine.destroy()
    engine = made(ep=1)
    for name, p in engine.module.named_parameters():
        if "experts" in name:
            p.data.zero_()
    engine.load_checkpoint(folder)
    found = engine.full_state_dict()
    engine.destroy()
    return rank != 0 or all(torch.equal(found[n], v) for n, v in want.items())


@pytest.mark.parametrize("background", [False, True])
def test_frozen_experts_are_saved(background: bool, tmp_path: Path) -> None:
    assert all(run_ranks(_frozen, 2, str(tmp_path), background, timeout=60))
