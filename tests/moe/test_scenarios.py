"""What users of mixtures of experts have suffered from, on two and four ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.moe.common import Case, build, cut, settings, tokens
from tests.ranks import run_ranks


def _router_of(choices: Tensor) -> Any:
    """Sends token t to the experts choices[t], whatever it is."""
    from zeroengine.moe.router import Routing

    class Scripted(nn.Module):
        num_experts = 4
        group = None
        subject = ""

        def __init__(self) -> None:
            from zeroengine.moe.statistics import Statistics

            super().__init__()
            self.statistics = Statistics(4)
            self.bias = None
            self.choices = choices

        def forward(self, x: Tensor) -> Routing:
            weights = torch.full(self.choices.shape, 0.5)
            return Routing(self.choices, weights, None, x.new_zeros(()))

    return Scripted()


def _maxima(rank: int, world: int) -> list[list[list[float]]]:
    """Local maxima of the ranks are 3 and 4; in training and evaluation; one and two experts a token."""
    import zeroengine
    from zeroengine.moe import ExpertList
    from zeroengine.moe.layer import SparseExperts

    class Net(nn.Module):
        def __init__(self, k: int) -> None:
            super().__init__()
            experts = [nn.Linear(2, 2, bias=False) for _ in range(4)]
            for i, e in enumerate(experts):
                nn.init.constant_(e.weight, float(i + 1))
            first = torch.tensor([[0], [0], [0], [3], [2]] if rank == 0 else [[1], [1], [1], [1], [2]])
            choices = first if k == 1 else torch.cat([first, (first + 1) % 4], 1)
            self.layer = SparseExperts(_router_of(choices), ExpertList(experts))  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    found = []
    for k in (1, 2):
        engine, *_ = zeroengine.initialize(model=Net(k), config=settings(Case(ep=world)))
        out = []
        for training in (True, False):
            engine.train(training)
            out.append(engine(torch.ones(5, 2)).sum(1).tolist())
        engine.destroy()
        found.append(out)
    return found


def test_ranks_with_unlike_largest_loads_do_not_stall() -> None:
    first = [[1, 1, 1, 4, 3], [2, 2, 2, 2, 3]]
    for rank, found in enumerate(run_ranks(_maxima, 2, timeout=60)):
        for k, rows in enumerate(found, start=1):
            want = [0.5 * 4 * sum((e - 1 + j) % 4 + 1 for j in range(k)) for e in first[rank]]
            assert rows == [want, want]


def _ones(rank: int, world: int) -> dict[str, Tensor]:
    """Every element gets a gradient of one; the weights after a step."""
    import zeroengine

    case = Case(ep=2, stage=2, kind="list")
    model = build(case)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine, *_ = zeroengine.initialize(model=model, config=settings(case))
    loss = torch.stack([p.sum() for p in engine.module.parameters()]).sum()
    engine.backward(loss)
    engine.step()
    after = engine.full_state_dict()
    engine.destroy()
    mine = {n: v.clone() for n, v in engine.module.state_dict().items()}
    # a dense gradient is the mean over four ranks; the sum of an expert's two holders is divided by all four
    moves = {n: 0.025 if "experts" in n else 0.05 for n in before}
    for found in (mine, mine if after is None else after):
        assert all(torch.allclose(before[n] - found[n], torch.full_like(before[n], moves[n]), atol=1e-6) for n in before)
    return mine


def test_every_element_moves_and_replicas_agree() -> None:
    first, *others = run_ranks(_ones, 4, timeout=60)
    assert all(torch.equal(first[n], other[n]) for other in others for n in first)


def _norms(rank: int, world: int) -> list[tuple[float, bool]]:
    """Expert gradients with squares 4, 16, 40 and 60."""
    import zeroengine
    from zeroengine.moe import ExpertList
    from zeroengine.moe.layer import SparseExperts

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            experts = [nn.Linear(1, 1, bias=False) for _ in range(4)]
            self.layer = SparseExperts(_router_of(torch.arange(4)[:, None]), ExpertList(experts))  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].sum()

    found = []
    for ep, stage in ((1, 0), (2, 0), (1, 3), (2, 3)):
        engine, *_ = zeroengine.initialize(model=Net(), config=settings(Case(ep=ep, stage=stage, clip=1.0)))
        loss = engine(2 * torch.tensor([[4.0], [16.0], [40.0], [60.0]]).sqrt())
        engine.backward(loss)
        engine.step()
        found.append((float(engine.get_global_grad_norm()), engine.was_step_clipped()))
        engine.destroy()
    return found


def test_the_clip_norm_counts_every_expert_once_wherever_it_is() -> None:
    for found in run_ranks(_norms, 2, timeout=60):
        assert all(abs(norm - 120**0.5) < 1e-4 and clipped for norm, clipped in found), found


def _parameters(rank: int, world: int) -> list[tuple[list[float], list[float]]]:
    return [_given(rank, world, how) for how in ("plain", "groups")]


def _given(rank: int, world: int, how: str) -> tuple[list[float], list[float]]:
    """`model.parameters()` straight in, or groups with options of their own."""
    import zeroengine

    case = Case(k=4, ep=2, stage=1, kind="list")
    model = build(case)
    config = {n: v for n, v in settings(case).items() if n != "optimizer"}
    given: Any
    if how == "plain":
        given = torch.optim.SGD(model.parameters(), lr=0.05)
    else:
        experts = [p for n, p in model.named_parameters() if "experts" in n]
        others = [p for n, p in model.named_parameters() if "experts" not in n]
        given = torch.optim.SGD([{"params": experts, "lr": 0.0}, {"params": others}], lr=0.05)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    engine, *_ = zeroengine.initialize(model=model, optimizer=given, config=config)
    x, y = tokens(case, 0, 0)
    mine = cut(case, world, rank)
    loss = engine(x[mine], y[mine], torch.tensor(world / len(x)))
    engine.backward(loss)
    engine.step()
    engine.destroy()
    moved = {n: float((v - before[n]).abs().max()) for n, v in model.state_dict().items()}
    return [m for n, m in moved.items() if "experts" in n], [m for n, m in moved.items() if "experts" not in n]


def test_no_optimizer_group_is_made_by_hand() -> None:
    for plain, groups in run_ranks(_parameters, 2, timeout=60):
        assert min(plain[0]) > 0 and min(plain[1]) > 0
        assert max(groups[0]) == 0 and min(groups[1]) > 0


def _statistics(rank: int, world: int) -> Any:
    import zeroengine

    case = Case(ep=2, k=2, layer={"drop_tokens": True, "capacity_factor": 0.5, "min_capacity": 1, "priority": "position"})
    engine, *_ = zeroengine.initialize(model=build(case), config=settings(case))
    for step in range(2):
        x, y = tokens(case, step, 0)
        mine = cut(case, world, rank)
        engine.backward(engine(x[mine], y[mine], torch.tensor(world / len(x))))
        engine.step()
    return engine.expert_statistics()["moe.sparse"]


def test_statistics_are_those_of_the_last_step() -> None:
    first, second = run_ranks(_statistics, 2, timeout=60)
    assert first == second and sum(first.load) == 2 * 20
    limit = 5  # 0.5 * 2 * 20 / 4
    assert first.dropped == sum(max(0, n - limit) for n in first.load) and 0 < first.entropy <= 1.3863 and first.skew >= 1.0


def _copied(rank: int, world: int) -> list[bool]:
    import copy

    import zeroengine

    case = Case(ep=1, layer={"drop_tokens": True})
    engine, *_ = zeroengine.initialize(model=build(case), config=settings(case))
    alone = copy.deepcopy(engine.module)
    x, y = tokens(case, 0, 0)
    if rank == 0:  # no other rank takes part
        alone(x, y, torch.tensor(1.0)).backward()
    return [p.grad is not None for p in alone.parameters()]


def test_a_copy_of_a_model_is_a_plain_one() -> None:
    got = run_ranks(_copied, 2, timeout=60)
    assert all(got[0]) and not any(got[1])


def test_names_of_deepspeed() -> None:
    from zeroengine.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    group = {"params": list(build(Case()).parameters()), "lr": 0.1}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert not any(is_moe_param(p) for p in group["params"])


def _memory(rank: int, world: int) -> list[tuple[dict[str, int], dict[str, int], int]]:
    import zeroengine

    found = []
    for ep, stage in ((1, 3), (2, 1), (2, 3)):
        case = Case(ep=ep, stage=stage, optimizer="AdamW")
        engine, *_ = zeroengine.initialize(model=build(case), config=settings(case))
        x, y = tokens(case, 0, 0)
        mine = cut(case, world, rank)
        engine.backward(engine(x[mine], y[mine], torch.tensor(world / len(x))))
        engine.step()
        held = sum(p.numel() for n, p in engine.module.named_parameters() if "experts" in n)
        found.append((engine.memory_report(), engine.planned_memory(), held))
        engine.destroy()
    return found


def test_a_rank_holds_what_was_planned() -> None:
    for found in run_ranks(_memory, 4, timeout=90):
        for measured, planned, _ in found:
            assert all(measured[kind] == planned[kind] for kind in ("parameters", "gradients", "optimizer")), (measured, planned)
        assert found[1][2] * 2 == found[0][2]
