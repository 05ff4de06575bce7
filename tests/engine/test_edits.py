"""Values that the user writes: by load_state_dict, in place, in forward. They last, or every rank says that it differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroengine
from tests.engine.versus_torch import TINY, Where, check, difference, fresh, one_mesh, whole_weights
from tests.parallel.hf_models import build as hf_model
from tests.ranks import run_ranks
from zeroengine.errors import DivergenceError, ModelError
from zeroengine.moe import ExpertList, MoE
from zeroengine.utils import safe_get_full_fp32_param
from zeroengine.zero import GatheredParameters
from zeroengine.zero.experts import expert_part
from zeroengine.zero.tensor import tensor_shard

pytestmark = pytest.mark.ranks
D = 6
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


def settings(stage: int, lr: float = 0.0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "bucket_size": TINY},
    }


def make(mesh: Any, stage: int, build: Callable[[], nn.Module] = small, lr: float = 0.0, **config: Any) -> Any:
    return zeroengine.initialize(model=fresh(build), config={**settings(stage, lr), **config}, mesh=mesh)[0]


def train(engine: Any, where: Where) -> None:
    engine.backward(engine(where.data(3, D)).float().square().mean())
    engine.step()


def numbers() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {n: torch.randn(p.shape, generator=g) for n, p in small().named_parameters()}


def _load(module: nn.Module) -> None:
    module.load_state_dict(numbers())


@torch.no_grad()
def _copy(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        p.copy_(numbers()[name])


def _data(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        p.data.copy_(numbers()[name])


def _gathered(module: nn.Module) -> None:
    with GatheredParameters(module.parameters()):
        _data(module)


@torch.no_grad()
def _write_once(own: list[tuple[str, nn.Parameter]], handles: list[Any], *_: Any) -> None:
    for name, p in own:
        p.copy_(numbers()[name])
    handles.pop().remove()


def _in_forward(module: nn.Module) -> None:
    """By each module in its next forward, where the values are gathered for it."""
    for prefix, child in module.named_modules():
        own = [(f"{prefix}.{name}" if prefix else name, p) for name, p in child.named_parameters(recurse=False)]

        handles: list[Any] = []
        if own:
            handles.append(child.register_forward_pre_hook(partial(_write_once, own, handles)))


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "load_state_dict": _load, "copy_": _copy, ".data": _data, "GatheredParameters": _gathered, "in forward": _in_forward,
}  # fmt: skip


def _last(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for precision, section in PRECISIONS.items():
        kind = torch.bfloat16 if section else torch.float32
        expected = {n: t.to(kind) for n, t in numbers().items()}
        for stage in (0, 1, 2, 3):
            for name, edit in EDITS.items():
                if stage == 3 and name == ".data":
                    continue  # a named error: test_released
                engine = make(mesh, stage, **section)
                for step in range(3):
                    if step == 1:
                        edit(engine.module)
                    train(engine, Where(step, 0, rank, ranks))
                worst, who = difference(whole_weights(engine), expected)
                if worst:
                    faults.append(f"{name} at stage {stage} in {precision}: {who} is off by {worst:.2e}")
                engine.destroy()
    return faults


def test_written_values_last() -> None:
    check(_last)


def _unlike(rank: int, ranks: int, stage: int) -> str:
    engine = make(one_mesh(), stage)
    train(engine, Where(0, 0, rank, ranks))
    if rank == 1:
        _load(engine.module)
    try:
        train(engine, Where(1, 0, rank, ranks))
    except DivergenceError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_values_loaded_on_one_rank_only(stage: int) -> None:
    for told in run_ranks(_unlike, 2, stage, timeout=60):
        assert "edited in place" in told and "0.weight" in told, told


class Renormalises(nn.Linear):
    """Writes into its own weight while it runs."""

    def __init__(self, through_data: bool = False) -> None:
        super().__init__(D, D)
        self.through_data = through_data

    def forward(self, x: Tensor) -> Tensor:
        if self.through_data:
            self.weight.data.mul_(0.5)
        else:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


def _in_forward(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for stage in (0, 1, 2, 3):
        engine = make(mesh, stage, Renormalises, lr=0.1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
        model = fresh(Renormalises)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            train(engine, Where(step, 0, rank, ranks))
            with torch.no_grad():  # every rank's forward edits its own copy alike: once a step
                model.weight.mul_(0.5)
            for r in range(ranks):
                x = Where(step, 0, r, ranks).data(3, D)
                (nn.functional.linear(x, model.weight, model.bias).square().mean() / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        worst, who = difference(whole_weights(engine), {n: p.detach() for n, p in model.named_parameters()})
        if not worst <= 1e-6:
            faults.append(f"stage {stage}: {who} is off by {worst:.2e}")
        engine.destroy()
    engine = make(mesh, 3, lambda: Renormalises(through_data=True))
    try:
        train(engine, Where(0, 0, rank, ranks))
        faults.append("a write through .data in forward at stage 3 is lost")
    except ModelError as error:
        if ".data" not in str(error) or "weight" not in str(error):
            faults.append(str(error))
    return faults


def test_writes_in_forward() -> None:
    check(_in_forward)


def _unedited(rank: int, ranks: int) -> list[str]:
    """An update is no edit: else every step would compare all values over the ranks."""
    mesh, faults = one_mesh(), []
    for stage in (0, 1, 2, 3):
        for name, precision in PRECISIONS.items():
            engine = make(mesh, stage, lr=0.1, **precision)
            for step in range(2):
                train(engine, Where(step, 0, rank, ranks))
                if any(engine.optimizer.edits.marks()):
                    faults.append(f"stage {stage}, {name}: step {step} left marks of an edit")
            engine.destroy()
    return faults


def test_an_update_is_no_edit() -> None:
    check(_unedited)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, D, max_norm=0.5), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def _embedding(rank: int, ranks: int, stage: int, alike: bool) -> str:
    engine = make(one_mesh(), stage, Bounded)
    try:
        for _ in range(2):
            engine.backward(engine(torch.arange(4) + (0 if alike else 4 * rank)).square().mean())
            engine.step()
    except DivergenceError as error:
        return str(error)
    norms = whole_weights(engine)["table.weight"].norm(dim=1)
    return f"{float(norms[:4].max()):.2f}"


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("alike", [True, False])
def test_embedding_that_bounds_its_rows(stage: int, alike: bool) -> None:
    for told in run_ranks(_embedding, 2, stage, alike, timeout=60):
        assert told == "0.50" if alike else "edited in place" in told, told


def _reads(rank: int, ranks: int) -> list[str]:
    """A read costs no gather more than itself and leaves a running backward alone."""
    engine, faults = make(one_mesh(), 3), []
    loss = engine(Where(0, 0, rank, ranks).data(3, D)).square().mean()
    with GatheredParameters(engine.module.parameters()):
        total = sum(float(p.sum()) for p in engine.module.parameters())
    engine.backward(loss)
    engine.step()
    try:
        with GatheredParameters(engine.module.parameters()):
            for p in engine.module.parameters():
                p.data.add_(1.0)
            raise KeyError("given up")
    except KeyError:
        pass
    with GatheredParameters(engine.module.parameters()):
        again = sum(float(p.sum()) for p in engine.module.parameters())
    if total != again:
        faults.append(f"an edit that ended in an exception was kept: {total} {again}")
    return faults


def test_reads_and_edits_that_were_given_up() -> None:
    check(_reads)


# --- who holds a parameter -------------------------------------------------------------------------------------------------


def _experts() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), MoE(D, ExpertList([nn.Linear(D, D) for _ in range(4)])))


# On 4 ranks: the mesh, the model, and which of its parameters only every second rank holds (None: all hold all).
HELD: list[tuple[dict[str, int], Callable[[], nn.Module], Callable[[nn.Parameter], Any] | None]] = [
    ({"dp_replicate": 2}, small, None),
    ({"tp": 2}, lambda: hf_model("llama"), tensor_shard),
    ({"tp": 2, "dp_replicate": 2}, lambda: hf_model("llama"), tensor_shard),
    ({"ep": 2}, _experts, expert_part),
    ({"ep": 2, "dp_replicate": 2}, _experts, expert_part),
]


def _holders(rank: int, ranks: int) -> list[str]:
    """All ranks that hold a parameter, replicas too, get the values of the one that is named. Edits of some of them are an error on
    all, and so is the name of a rank that holds another part."""
    faults = []
    for stage, (degrees, build, part) in product((0, 1, 2, 3), HELD):
        label, writer = f"stage {stage} {degrees}", 2 if part is None else 2 + rank % 2
        model = fresh(build)
        if "ep" not in degrees:
            list(model.parameters())[-2 if part is None else -1].requires_grad_(False)
        engine = zeroengine.initialize(model=model, config={**settings(stage), "mesh": degrees})[0]
        params = [p for p in model.parameters() if part is None or part(p) is not None]
        with torch.no_grad(), GatheredParameters(params, modifier_rank=writer):
            if rank == writer:
                for p in params:
                    p.fill_(7.0)
        with GatheredParameters(params):
            if not all(bool((p == 7.0).all()) for p in params):
                faults.append(f"{label}: not everywhere")
        if not all(bool((safe_get_full_fp32_param(p) == 7.0).all()) for p in params):
            faults.append(f"{label}: not in the masters")
        if part is None:
            train(engine, Where(0, 0, rank, ranks))
        else:
            with pytest.raises(ModelError, match="does not hold parameter"):
                GatheredParameters(params, modifier_rank=3 - rank % 2)
        for p in (params[0], params[-1]):
            with pytest.raises(DivergenceError, match="not to the same values on all ranks"):
                with torch.no_grad(), GatheredParameters(p):
                    p.fill_(float(rank // 2))
        engine.destroy()
    return faults


def test_all_that_hold_a_parameter_get_its_edit() -> None:
    check(_holders, 4)
