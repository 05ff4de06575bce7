"""Keys of the configuration that change what the engine does in a step, in memory, in a save and in its log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zeroengine
from tests.engine.versus_torch import TINY, Where, check, difference, fresh, one_mesh, whole_weights
from tests.ranks import run_ranks
from zeroengine.errors import CheckpointError, ConfigError, ModelError
from zeroengine.logging import logger
from zeroengine.zero.build import ShardingRule, _persistent

D = 6


class Partly(nn.Module):
    """`spare` is used if the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, all_of_it: bool = True) -> Tensor:
        out = self.used(x)
        return self.spare(out) if all_of_it else out


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def make(mesh: Any, stage: int = 1, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "bucket_size": TINY, **(zero or {})},
        **config,
    }
    return zeroengine.initialize(model=fresh(Partly), config=settings, mesh=mesh)[0]


def train(engine: Any, rank: int, factor: float = 1.0, all_of_it: bool = True) -> None:
    engine.backward(engine(Where(0, 0, rank, 2).data(3, D), all_of_it).square().mean() * factor)
    engine.step()


def _prescale(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    logger.setLevel("ERROR")
    for reduction in ("mean", "sum"):
        base = {"gradient_reduction": reduction}
        plain = make(mesh, **base)
        train(plain, rank)
        for extra in ({}, {"gradient_predivide_factor": 8.0}):
            engine = make(mesh, 2, prescale_gradients=True, **base, **extra)
            train(engine, rank)
            worst, who = difference(whole_weights(engine), whole_weights(plain))
            if not worst <= 1e-6:
                faults.append(f"{reduction} {extra}: {who} differs by {worst:.2e}")
    large = 4e5  # gradients within the range of fp16 whose sum is not, unless they are divided before
    for prescale in (False, True):
        engine = make(mesh, 1, communication_data_type="fp16", prescale_gradients=prescale, gradient_predivide_factor=64.0)
        train(engine, rank, large)
        if engine.was_step_applied() is not prescale:
            faults.append(f"prescale {prescale}: applied {engine.was_step_applied()}, norm {engine.get_global_grad_norm()}")
    return faults


@pytest.mark.ranks
def test_gradients_divided_before_the_sum() -> None:
    check(_prescale)


def _unused(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    for stage in (0, 3):
        train(make(mesh, stage), rank, all_of_it=False)
        engine = make(mesh, stage, {"ignore_unused_parameters": False})
        train(engine, rank, all_of_it=rank == 0 or stage == 3)  # some rank used it
        try:
            train(engine, rank, all_of_it=False)
            faults.append(f"stage {stage}: accepted")
        except ModelError as error:
            if "spare.weight, spare.bias" not in str(error) or "ignore_unused_parameters" not in str(error):
                faults.append(str(error))
    return faults


@pytest.mark.ranks
def test_unused_parameters_are_an_error_if_so_configured() -> None:
    check(_unused)


def test_bound_on_the_parameters_that_stay_whole() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (5, 3, 9, 4, 40)])

    def whole(bound: int | None) -> list[int]:
        chosen = _persistent(model, ShardingRule(3, None, 100, 10, persistent_total=bound))
        return sorted(p.numel() for p in model if id(p) in chosen)

    assert whole(None) == [3, 4, 5, 9] and whole(12) == [3, 4, 5] and whole(11) == [3, 4] and whole(0) == []


def _persist(rank: int, ranks: int) -> list[str]:
    zero = {"stage3_param_persistence_threshold": 10}
    engine = make(one_mesh(), 3, zero)
    bounded = make(one_mesh(), 3, {**zero, "stage3_model_persistence_threshold": 6})
    held = [sum(b.layout.numel for b in e.mechanism.buckets if not b.policy.shard_params) for e in (engine, bounded)]
    return [] if held == [12, 6] else [f"whole: {held}"]


@pytest.mark.ranks
def test_bound_on_the_parameters_that_stay_whole_in_an_engine() -> None:
    check(_persist)


def _breakdowns(rank: int, ranks: int) -> list[str]:
    mesh, faults = one_mesh(), []
    logger.setLevel("INFO")
    for on in (False, True):
        heard = Heard()
        logger.addHandler(heard)
        engine = make(mesh, steps_per_print=2, wall_clock_breakdown=on, memory_breakdown=on)
        for _ in range(4):
            train(engine, rank)
        logger.removeHandler(heard)
        times = [line for line in heard.lines if "forward" in line and "backward" in line and "ms a step" in line]
        sizes = [line for line in heard.lines if "this rank holds" in line and "optimizer" in line]
        expected = 2 if on and rank == 0 else 0
        if (len(times), len(sizes)) != (expected, expected):
            faults.append(f"on {on}: {heard.lines}")
    return faults


@pytest.mark.ranks
def test_times_and_memory_in_the_log() -> None:
    check(_breakdowns)


def _tags(rank: int, ranks: int, folder: str) -> list[str]:
    mesh, faults, heard = one_mesh(), [], Heard()
    logger.addHandler(heard)
    for wanted in ("Ignore", "Warn", "Fail"):
        engine = make(mesh, checkpoint={"tag_validation": wanted})
        heard.lines.clear()
        tag = f"{wanted}{rank}"
        try:
            engine.save_checkpoint(folder, tag)
            if wanted == "Fail":
                faults.append("Fail: saved")
        except CheckpointError as error:
            if wanted != "Fail" or "rank 1: Fail1" not in str(error):
                faults.append(str(error))
        told = [line for line in heard.lines if "different tags" in line]
        if len(told) != int(wanted == "Warn" and rank == 0):
            faults.append(f"{wanted}: {heard.lines}")
    found = sorted(p.name for p in Path(folder).iterdir() if p.is_dir())
    return faults if found == ["Ignore0", "Warn0"] else [*faults, str(found)]


@pytest.mark.ranks
def test_unlike_tags(tmp_path: Path) -> None:
    assert run_ranks(_tags, 2, str(tmp_path), timeout=100) == [[], []]


def _reach(rank: int, ranks: int, folder: str) -> list[str]:
    """Keys that change neither results nor what is held: where they arrive."""
    from zeroengine.moe import ExpertList, MoE

    mesh, faults, heard = one_mesh(), [], Heard()
    logger.setLevel("INFO")
    logger.addHandler(heard)
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    data = TensorDataset(torch.arange(7.0)[:, None].expand(7, D))
    for drop in (False, True):
        config = {
            "dataloader_drop_last": drop,
            "dump_state": drop,
            "aio": {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2},
        }
        settings = {
            "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 1, **disk}, "gradient_clipping": 0.123, **config,
        }  # fmt: skip
        engine, _, loader, _ = zeroengine.initialize(model=fresh(Partly), config=settings, mesh=mesh, training_data=data)
        lengths = [len(batch[0]) for batch in loader]
        if lengths != ([3] if drop else [3, 1]):
            faults.append(f"drop_last {drop}: batches of {lengths}")
        rule = engine.mechanism.placement._files
        if (rule.block, rule.requests) != (8192, 6):
            faults.append(f"files are accessed by {rule}")
        shown = any('"gradient_clipping": 0.123' in line for line in heard.lines)
        if shown is not (drop and rank == 0):
            faults.append(f"dump_state {drop}: {shown}")
        engine.destroy()
    logger.removeHandler(heard)
    for above, copies in ((1.0, True), (5.0, False)):
        model = nn.Sequential(MoE(D, ExpertList([nn.Linear(D, D) for _ in range(4)])))
        config = {"train_micro_batch_size_per_gpu": 1, "mesh": {"ep": 2}, "moe": {"copies": copies, "copies_above": above}}
        engine, *_ = zeroengine.initialize(model=model, config=config)
        group = engine.experts.group
        if (group.copies, group.tolerance) != (copies, above):
            faults.append(f"copies {group.copies} above {group.tolerance}")
        engine.destroy()
    return faults


@pytest.mark.ranks
def test_keys_that_arrive_where_they_are_used(tmp_path: Path) -> None:
    assert run_ranks(_reach, 2, str(tmp_path), timeout=100) == [[], []]


def test_node_local_storage_only_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroengine.config import Config
    from zeroengine.engine.initialize import _check_folders

    settings = Config.load({"train_batch_size": 1, "checkpoint": {"use_node_local_storage": True}})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    _check_folders(settings)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="use_node_local_storage"):
        _check_folders(settings)
