"""The engine's loader: each rank its part, every epoch in another order, and a resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import zeroengine
from tests.engine.versus_torch import fresh, one_mesh
from tests.ranks import run_ranks
from zeroengine.engine.data import EngineLoader


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([float(i)])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in range(25))


def loader(dataset: Any = None, ranks: int = 2, rank: int = 0, size: int = 2, drop_last: bool = False) -> EngineLoader:
    return EngineLoader(dataset if dataset is not None else Numbers(), size, ranks, rank, None, drop_last, 5)


def rows(batches: Iterator[Tensor], count: int | None = None) -> list[list[float]]:
    found = []
    while count is None or len(found) < count:
        batch = next(batches, None)
        if batch is None:
            break
        found.append(batch.flatten().tolist())
    return found


@pytest.mark.parametrize("dataset", [Numbers(), Stream()])
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_goes_on_where_it_stood(dataset: Any, taken: int, drop_last: bool) -> None:
    before = loader(dataset, drop_last=drop_last)
    first = rows(iter(before))
    running = iter(before)
    head = rows(running, taken)
    state = before.state_dict()
    rest = rows(running)
    third = rows(iter(before))
    after = loader(dataset, drop_last=drop_last)
    after.load_state_dict(state)
    torch.manual_seed(1)
    untouched = torch.get_rng_state()
    assert rows(iter(after)) == rest and rows(iter(after)) == third
    assert torch.equal(torch.get_rng_state(), untouched)
    assert len(head) == taken and len(head + rest) == len(first)
    if isinstance(dataset, Numbers):
        assert first != head + rest != third and len(after) == len(first)


def test_a_pass_that_is_left_is_over() -> None:
    left, whole = loader(), loader()
    rows(iter(left), 2)
    rows(iter(whole))
    assert rows(iter(left)) == rows(iter(whole)) and left.epoch == whole.epoch == 2


def test_on_another_number_of_ranks_no_sample_is_lost() -> None:
    before = [loader(rank=r) for r in range(2)]
    running = [iter(b) for b in before]
    seen = {v for it in running for row in rows(it, 3) for v in row}  # 12 samples
    after = [loader(ranks=3, rank=r) for r in range(3)]
    for one in after:
        one.load_state_dict(before[0].state_dict())
        assert one.position == 2
    for one in after:
        seen |= {v for row in rows(iter(one)) for v in row}
    assert seen == {float(i) for i in range(23)}


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x / 10).square().mean()


def make(mesh: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    return zeroengine.initialize(model=fresh(Noisy), config=config, mesh=mesh, training_data=Numbers())[0]


def _resume(rank: int, ranks: int, folder: str) -> tuple[list[float], list[float], list[float]]:
    mesh = one_mesh()
    engine = make(mesh)
    expected = []
    for step in range(7):  # an epoch has 3 steps
        expected.append(float(engine.train_batch()))
        if step == 3:
            engine.save_checkpoint(folder)
    again = make(mesh)
    again.load_checkpoint(folder)
    fresh_engine = [float(again.train_batch()) for _ in range(3)]
    engine.load_checkpoint(folder)  # an engine that has trained goes back too
    back = [float(engine.train_batch()) for _ in range(3)]
    dropout = engine.module.net[1].eval()
    engine.eval_batch(iter([torch.ones(2, 1)]))
    assert engine.module.training and not dropout.training  # each part is in the mode that its user gave it
    return expected[4:], fresh_engine, back


@pytest.mark.ranks
def test_training_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    for expected, resumed, back in run_ranks(_resume, 2, str(tmp_path), timeout=100):
        assert resumed == expected and back == expected
