"""What does not fit is told by name, and what cannot be written hurts nobody: the old checkpoint stays, training goes on."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.checkpoint.engines import Awkward, build, fill, train
from tests.checkpoint.scenarios import error_of, run_scenarios
from tests.engine.models import TinyLM, config
from tests.ranks import run_ranks
from zeroengine.logging import logger


def _other_optimizer(d: Path, rank: int) -> list[Any]:
    """Refused with names, and nothing is changed: training goes on as it would have."""
    engine = build(1)
    train(engine, 0, 1, rank)
    engine.save_checkpoint(d)
    engine.destroy()
    engine = build(3, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    expected = train(engine, 0, 4, rank)
    engine.destroy()
    engine = build(3, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    first = train(engine, 0, 2, rank)
    told = error_of(lambda: engine.load_checkpoint(d))
    rest = train(engine, 2, 2, rank)
    engine.destroy()
    plain = build(1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    train(plain, 0, 1, rank)
    plain.save_checkpoint(d / "plain")
    plain.destroy()
    fresh = build(0, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    error_of(lambda: fresh.load_checkpoint(d))
    untouched = not fresh.optimizer.state and "which kept none" in error_of(lambda: fresh.load_checkpoint(d / "plain"))
    fresh.destroy()
    return ["blocks.0.down.bias has no momentum_buffer" in told, "exp_avg" in told, first + rest == expected, untouched]


def _other_model(d: Path, rank: int) -> list[Any]:
    import zeroengine

    engine = build(3)
    fill(engine)
    engine.save_checkpoint(d)
    engine.destroy()
    model = TinyLM(blocks=2)
    model.extra = nn.Linear(2, 2)
    engine, *_ = zeroengine.initialize(model=model, config=config(2, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}))
    told = error_of(lambda: engine.load_checkpoint(d))
    engine.load_checkpoint(d, load_module_strict=False, load_optimizer_states=False)
    weights = engine.full_state_dict() or {}
    engine.destroy()
    return [
        "missing keys: model.extra.bias, model.extra.weight" in told,
        "unexpected keys: model.frozen.weight, model.row, model.scale, model.seen, model.turned" in told,
        rank != 0 or bool((weights["emb.weight"] >= 0.25).all()),
    ]


def _disk_full(d: Path, rank: int) -> list[Any]:
    """Rank 1 cannot write: an error everywhere, the last checkpoint stays, training goes on, and the next save works."""
    engine = build(3)
    train(engine, 0, 1, rank)
    engine.save_checkpoint(d)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = []
    for blocking in (True, False):
        train(engine, 1, 1, rank)
        try:
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
            told.append(error_of(lambda: [engine.save_checkpoint(d, tag="bad", blocking=blocking), engine.wait_for_checkpoint()]))  # noqa: B023
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    losses = train(engine, 2, 1, rank)
    left = sorted(p.name for p in d.iterdir())
    engine.mechanism.groups.control.barrier("looked")
    engine.save_checkpoint(d, tag="after")
    path, _ = engine.load_checkpoint(d)
    engine.destroy()
    return [
        all("failed on rank 1" in t and "File too large" in t for t in told) or told,
        "background" in told[1],
        left == ["global_step1", "latest"] or left,
        str(path).endswith("after"),
        losses[0] > 0,
    ]


def _no_permission(d: Path, rank: int) -> list[Any]:
    """Nobody may write there any more: the same, with the remedy in the message."""
    engine = build(2)
    expected = train(engine, 0, 3, rank)
    engine.destroy()
    engine = build(2)
    train(engine, 0, 1, rank)
    engine.save_checkpoint(d)
    told = []
    with _unprivileged(d, rank):
        engine.mechanism.groups.control.barrier("closed")
        for blocking in (True, False):
            told.append(error_of(lambda: [engine.save_checkpoint(d, tag="bad", blocking=blocking), engine.wait_for_checkpoint()]))  # noqa: B023
        engine.mechanism.groups.control.barrier("tried")
    losses = train(engine, 1, 2, rank)
    names = sorted(p.name for p in d.iterdir())
    engine.load_checkpoint(d)
    again = train(engine, 1, 2, rank)
    engine.destroy()
    return [
        all("PermissionError" in t and "accessible to this user" in t and str(d) in t for t in told) or told,
        names == ["global_step1", "latest"] or names,
        losses == expected[1:] == again,
    ]


def _schedule_and_options(d: Path, rank: int) -> list[Any]:
    """Options of the checkpoint win, and it is said; a schedule that the checkpoint lacks starts from its beginning, and it is said."""
    import zeroengine

    engine = build(1, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.3}})
    train(engine, 0, 2, rank)
    engine.save_checkpoint(d)
    engine.destroy()
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}}
    settings = config(3, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, scheduler=warmup)
    engine, *_ = zeroengine.initialize(model=Awkward(), config=settings)
    with _log() as said:
        engine.load_checkpoint(d)
    weight_decay = engine.optimizer.param_groups[0]["weight_decay"]
    engine.destroy()
    text = "\n".join(said)
    return [
        weight_decay == 0.3,
        rank != 0 or "weight_decay 0.1 -> 0.3" in text or text,
        rank != 0 or "the checkpoint has no scheduler" in text or text,
    ]


@contextmanager
def _unprivileged(d: Path, rank: int) -> Iterator[None]:
    """Inside, this process may not write into `d`. The super-user may write everywhere, so it is somebody else meanwhile."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
        return
    d.chmod(0o500)
    try:
        yield
    finally:
        d.chmod(0o700)


@contextmanager
def _log() -> Iterator[list[str]]:
    """What the engine says inside."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


SCENARIOS = (
    _other_optimizer, _other_model, _disk_full, _no_permission, _schedule_and_options,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_scenarios, 2, str(tmp_path_factory.mktemp("trouble")), SCENARIOS, timeout=240)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__.strip("_"))
def test_trouble_is_told_and_hurts_nobody(outcomes: list[dict[str, Any]], scenario: Any) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(scenario.__name__, "not reached") == "", f"rank {rank}: {outcome.get(scenario.__name__)}"
