"""`zero.Init` where users of other engines lost values, memory or time: parameters exchanged in a constructor, loaders that compare
shapes, missing keys, nested construction, batch sizes before there are ranks, optimizers over whole matrices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

import zeroengine
from tests.engine.versus_torch import STAGES, clean, difference, run_jobs, whole_weights
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError
from zeroengine.zero import GatheredParameters, Init, materialize
from zeroengine.zero.residency import ReleasedParameter

D = 6


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "bucket_size": 40}, "steps_per_print": None, **changes,
    }  # fmt: skip


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, D, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: nn.Module, rank: int, steps: int = 2, **config: Any) -> dict[str, Tensor]:
    engine, *_ = zeroengine.initialize(model=model, config=settings(**config))
    for step in range(steps):
        engine.backward(engine(data(step, rank)).square().mean())
        engine.step()
    weights = whole_weights(engine)
    engine.destroy()
    return weights


def built(build: Callable[[], nn.Module], sharded: bool) -> nn.Module:
    torch.manual_seed(5)
    if not sharded:
        return build()
    with Init():
        return build()


class Swaps(nn.Module):
    """Parameters that are exchanged while the constructor runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = old_weight_norm(nn.Conv1d(1, 3, 3))
        self.new = parametrizations.weight_norm(nn.Linear(3 * (D - 2), D))
        del self.new.bias
        self.new.bias = nn.Parameter(torch.zeros(D))
        self.late = nn.Linear(D, D)
        self.late.weight = nn.Parameter(self.late.weight.data * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.new(self.conv(x.unsqueeze(1)).flatten(1)).tanh())


def _swapped(rank: int, world: int) -> list[str]:
    faults = []
    for stage in STAGES:
        plain, mine = (trained(built(Swaps, sharded), rank, stage=stage) for sharded in (False, True))
        worst, who = difference(mine, plain)
        if worst or len(mine) != 8:
            faults.append(f"stage {stage}: {who} differs by {worst:.1e}, {sorted(mine)}")
    return faults


def test_parameters_exchanged_in_the_constructor_train(found: list[dict[str, Any]]) -> None:
    clean(found, _swapped)


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, D, bias=False))


def _whole_matrices(rank: int, world: int) -> list[str]:
    """Muon, LAMB and Adafactor see the matrices of a sharded build, in fp32 and with masters; groups by `ndim` are right."""
    faults = []
    for kind in ("Muon", "Lamb", "Adafactor"):
        for precision in ({}, {"bf16": {"enabled": True}}):
            for stage in STAGES:
                results = []
                for sharded in (False, True):
                    model = built(matrices, sharded)
                    groups = [
                        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.02},
                        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.01},
                    ]
                    if [len(g["params"]) for g in groups] != [2, 1] or sum(p.numel() for p in model.parameters()) != 4 * D + 4 + 4 * D:
                        faults.append(f"{kind}: groups by ndim {groups}")
                    config = settings(stage, optimizer={"type": kind, "params": {"lr": 0.02}}, **precision)
                    engine, *_ = zeroengine.initialize(model=model, model_parameters=groups, config=config)
                    engine.backward(engine(data(0, rank)).float().square().mean())
                    engine.step()
                    results.append(whole_weights(engine))
                    engine.destroy()
                worst, who = difference(results[1], results[0])
                # where a matrix lies in memory may decide how its product is rounded
                if not worst <= (2e-2 if precision else 1e-5):
                    faults.append(f"{kind} stage {stage} {precision}: {who} differs by {worst:.1e}")
    return faults


def test_optimizers_over_whole_matrices_of_a_sharded_build(found: list[dict[str, Any]]) -> None:
    clean(found, _whole_matrices)


def _skips_mismatches(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """A loader that leaves out what does not fit, as "ignore mismatched sizes" does."""
    own = model.state_dict()
    skipped = [n for n in own if own[n].shape != state[n].shape]
    model.load_state_dict({n: state[n] for n in own if n not in skipped}, strict=False)
    return skipped


@torch.no_grad()
def _by_hand(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    skipped = []
    for name, p in model.named_parameters():
        if p.shape == state[name].shape:
            p.copy_(state[name])
        else:
            skipped.append(name)
    return skipped


def _loads(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    model.load_state_dict(state)
    return []


def _loaders(rank: int, world: int) -> list[str]:
    torch.manual_seed(77)
    state, faults = matrices().state_dict(), []
    for load in (_loads, _skips_mismatches, _by_hand):
        for stage in (None, 3):  # before an engine, and inside one
            model = built(matrices, True)
            engine = None if stage is None else zeroengine.initialize(model=model, config=settings(stage))[0]
            skipped = load(model, state)
            with GatheredParameters(model.parameters()):
                got = {n: p.detach().clone() for n, p in model.named_parameters()}
            worst, who = difference(got, state)
            if skipped or worst:
                faults.append(f"{load.__name__} at {stage}: skipped {skipped}, {who} is off by {worst:.1e}")
            if engine is not None:
                engine.destroy()
    with torch.device("meta"):
        model = matrices()
    materialize(model, state)
    with GatheredParameters(model.parameters()):
        worst, who = difference({n: p.detach() for n, p in model.named_parameters()}, state)
    return faults if not worst else [*faults, f"materialize: {who}"]


def test_loaders_that_compare_shapes_find_nothing_to_skip(found: list[dict[str, Any]]) -> None:
    clean(found, _loaders)


_watched: list[int] = []


class Counts(nn.Linear):
    """Says at each initialisation how many elements are whole on this rank."""

    everything: list[nn.Module] = []

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            mine = [p for m in self.everything for p in m.parameters()]
            _watched.append(sum(p.numel() for p in mine if not isinstance(p, ReleasedParameter) and not p.is_meta))


def _missing(rank: int, world: int) -> list[int]:
    with torch.device("meta"):
        model = nn.Sequential(*(Counts(32, 32, bias=False) for _ in range(10)))
    Counts.everything = [model]
    materialize(model, {"4.weight": torch.ones(32, 32)})
    return list(_watched)


def test_missing_values_are_made_module_by_module() -> None:
    for seen in run_ranks(_missing, 2, timeout=60):
        assert len(seen) == 9 and max(seen) <= 2 * 32 * 32, seen


class Outer(nn.Module):
    """Builds an inner model under a context of its own, as constructors of pretrained parts do."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        with Init():
            self.inner = matrices()
            if fails:
                raise KeyError("construction failed")
        self.last = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def _tensors() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter, ReleasedParameter))


def _nested(rank: int, world: int) -> list[str]:
    faults = []
    before = {
        name: getattr(owner, name) for owner, name in ((torch, "empty"), (torch, "zeros"), (Tensor, "__new__"), (nn.Module, "__init__"))
    }
    plain = trained(built(Outer, False), rank, stage=3)
    mine = trained(built(Outer, True), rank, stage=3)
    if difference(mine, plain)[0]:
        faults.append(f"nested: {difference(mine, plain)}")
    engine, *_ = zeroengine.initialize(model=built(Outer, True), config=settings(3))
    counts = []
    for step in range(20):
        engine.backward(engine(data(step, rank)).square().mean())
        engine.step()
        counts.append(_tensors())
    if max(counts[5:]) > max(counts[2:5]):
        faults.append(f"tensors after each step: {counts}")
    engine.destroy()
    with pytest.raises(KeyError), Init():
        Outer(fails=True)
    after = {
        name: getattr(owner, name) for owner, name in ((torch, "empty"), (torch, "zeros"), (Tensor, "__new__"), (nn.Module, "__init__"))
    }
    if before != after or isinstance(nn.Linear(2, 2).weight, ReleasedParameter):
        faults.append("something is left of a construction that failed")
    return faults


def test_nested_construction_keeps_nothing(found: list[dict[str, Any]]) -> None:
    clean(found, _nested)


def _batch_sizes(rank: int, world: int) -> str:
    """All three batch keys, for the ranks that there are: no matter when the context is entered."""
    config = settings(3, train_batch_size=16, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    first = dist.is_initialized()
    with Init(config_dict_or_path=config):
        one = matrices()
    zeroengine.init_distributed(verbose=False)
    with Init(config_dict_or_path=config):
        two = matrices()
    sizes = []
    for model in (one, two):
        engine, *_ = zeroengine.initialize(model=model, config=config)
        sizes.append(engine.get_batch_info())
        engine.destroy()
    try:
        zeroengine.initialize(model=matrices(), config={**config, "train_batch_size": 8})
    except ConfigError as error:
        return f"{first} {sizes} {error}"
    return "accepted"


def test_batch_sizes_are_those_of_the_ranks_whenever_the_context_is_entered() -> None:
    for told in run_ranks(_batch_sizes, 2, timeout=60):
        assert told.startswith("False [(16, 4, 2), (16, 4, 2)]") and "× 2 data-parallel ranks = 16" in told, told


def _sharded_use(rank: int, world: int) -> float:
    """The local shape says it: half of each on two ranks, without a group made by hand."""
    with Init():
        model = matrices()
    return max(float(F.mse_loss(p._zero.bucket.shard.sum() * 0, torch.zeros(()))) + p._zero.bucket.shard.numel() / p.numel()
               for p in model.parameters() if isinstance(p, ReleasedParameter))  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_a_build_before_the_process_group_is_sharded(world: int) -> None:
    assert run_ranks(_sharded_use, world, timeout=60) == [1 / world] * world


JOBS = [_swapped, _whole_matrices, _loaders, _nested]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """All of it, in one launch of ranks."""
    return run_ranks(run_jobs, 2, JOBS, timeout=240)
