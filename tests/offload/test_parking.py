"""`offload_states` and `reload_states`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.models import TinyLM, tokens
from tests.offload.runs import Plan, advance, start
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, ModelError, OffloadError


class Names(Enum):
    optim_states = "optim_states"
    hp_params = "hp_params"


class Place(Enum):
    nvme = "nvme"


def refused(act: Any, kind: type[Exception] = OffloadError) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    return ""


def _parks(rank: int, world: int, folder: str, stage: int, dtype: str, include: Any, optimizer: Any) -> list[str]:
    faults = []
    plan = Plan(stage, dtype=dtype, **({"optimizer": optimizer} if optimizer else {}))
    plain = start(plan, folder)
    expected, weights = advance(plain, rank, 0, 4), plain.full_state_dict()
    plain.destroy()
    engine = start(plan, folder)
    got = advance(engine, rank, 0, 2)
    before = engine.memory_report()
    for place in ({"device": "nvme", "nvme_path": folder}, {}):
        if place and include is not None:
            place["device"] = Place.nvme
        engine.offload_states(include, **place)
        held = engine.memory_report()
        if place:
            if not held["disk"] > 0.9 * before["optimizer"]:
                faults.append(f"not on disk: {held} of {before}")
            if include is None and any(held[k] for k in ("parameters", "optimizer", "gradients")):
                faults.append(f"still here: {held}")
            if not list(Path(folder).glob(f"*rank{rank}.*/parked.bin")):
                faults.append("no file")
        parameter = engine.module.blocks[0].up.weight
        uses = {
            "forward": lambda: engine(*tokens(0, 0, rank)),
            "step": engine.step,
            "save": lambda: engine.save_checkpoint(f"{folder}/never"),
            "weights": engine.full_state_dict,
        }
        if include is None and place:
            uses["parameter"] = parameter.sum
        for what, act in uses.items():
            if "call engine.reload_states()" not in refused(act):
                faults.append(f"{what} is not refused")
        engine.reload_states()
        engine.reload_states()
        after = engine.memory_report()
        if any(after[k] != before[k] for k in ("parameters", "optimizer", "disk")):
            faults.append(f"back: {after} and not {before}")
        more = advance(engine, rank, 2 + len(got[1]) - 2, 1)
        got = (got[0] + more[0], got[1] + more[1])
    if got != expected:
        faults.append(f"{got} instead of {expected}")
    again = engine.full_state_dict()
    if rank == 0 and not all(torch.equal(w, again[n]) for n, w in weights.items()):
        faults.append("other weights")
    engine.offload_states(include, device="nvme", nvme_path=folder)
    engine.destroy()
    if list(Path(folder).glob(f"*rank{rank}.*")):
        faults.append("files are left")
    return faults


@pytest.mark.parametrize(
    ("stage", "dtype", "include", "optimizer"),
    [
        (1, "fp32", None, None), (2, "bf16", None, None), (3, "fp32", None, None), (3, "bf16", None, None),
        (2, "bf16", [Names.optim_states, Names.hp_params], None), (2, "fp32", ["optim_states"], None),
        (3, "bf16", None, "unknown"), (0, "bf16", None, None),
    ],
)  # fmt: skip
def test_states_leave_and_come_back(stage: int, dtype: str, include: Any, optimizer: Any, tmp_path: Path) -> None:
    assert run_ranks(_parks, 2, str(tmp_path), stage, dtype, include, optimizer, timeout=60) == [[], []]


def _refuses(rank: int, world: int, folder: str) -> list[str]:
    engine = start(Plan(2), folder)
    told = [
        refused(lambda: engine.offload_states(["weights"]), ConfigError),
        refused(lambda: engine.offload_states(device="nvme"), ConfigError),
        refused(lambda: engine.offload_states(device="moon"), ConfigError),
    ]
    engine.backward(engine(*tokens(0, 0, rank)))
    told.append(refused(engine.offload_states, ModelError))
    return told


def test_what_is_refused(tmp_path: Path) -> None:
    told = run_ranks(_refuses, 1, str(tmp_path), timeout=60)[0]
    for text, expected in zip(told, ["'weights'", "nvme_path", "'moon'", "after engine.step()"], strict=True):
        assert expected in text


def _storages(rank: int, world: int, folder: str) -> list[str]:
    """Before any step and for an engine that only evaluates, twice in a row: the memory itself is given up, and comes back."""
    import zeroengine

    faults = []
    for stage, trains in ((2, True), (3, True), (3, False), (1, False)):
        torch.manual_seed(1)
        settings = Plan(stage, dtype="bf16").settings(folder)
        settings = settings if trains else {k: v for k, v in settings.items() if k != "optimizer"}
        engine = zeroengine.initialize(model=TinyLM(), config=settings)[0]
        before = engine.full_state_dict()
        held = [b.shard for b in engine.mechanism.buckets] + [m.flat for m in (engine.optimizer.masters if trains else [])]
        watched = [StorageWeakRef(t.untyped_storage()) for t in held]
        del held
        for _ in range(2):
            engine.offload_states(device="nvme", nvme_path=folder)
            engine.offload_states(device="nvme", nvme_path=folder)
        alive = sum(not w.expired() for w in watched)
        if alive:
            faults.append(f"stage {stage}, trains {trains}: {alive} of {len(watched)} storages are alive")
        engine.reload_states()
        engine.reload_states()
        after = engine.full_state_dict()
        if rank == 0 and not all(torch.equal(w, after[n]) for n, w in before.items()):
            faults.append(f"stage {stage}, trains {trains}: other weights")
        if trains:
            advance(engine, rank, 0, 1)
        engine.destroy()
    return faults


def test_memory_is_given_up_before_a_step_and_without_an_optimizer(tmp_path: Path) -> None:
    assert run_ranks(_storages, 2, str(tmp_path), timeout=60) == [[], []]
