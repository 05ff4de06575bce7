"""16-bit types, recomputation and offload inside the stages of a pipeline, and what the stages decide together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.pipeline import common
from tests.ranks import run_ranks
from zeroengine.errors import OffloadError

STEPS, MICRO = 3, 4
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}}
BF16 = {"bf16": {"enabled": True}}


def _config(folder: str, stage: int, state: str | None = None, values: str | None = None, **more: Any) -> dict[str, Any]:
    made = common.config(stage, MICRO, gradient_clipping=0.5, **more)
    for name, device in (("offload_optimizer", state), ("offload_param", values)):
        if device is not None:
            made["zero_optimization"][name] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    return made


def _engine(config: dict[str, Any], stages: int, **options: Any) -> Any:
    return zeroengine.initialize(model=common.module(stages, **options), config=config)[0]


def _steps(engine: Any, first: int = 0, steps: int = STEPS) -> list[tuple[float, float]]:
    group = engine.mesh.sample_group
    return [
        (float(engine.train_batch(common.batches(step, MICRO, group))), engine.get_global_grad_norm())
        for step in range(first, first + steps)
    ]  # fmt: skip


# --- the same numbers ---------------------------------------------------------------------------------------------------

PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16, state on a disk": ({"stage": 2, **BF16}, {"state": "nvme"}),
    "bf16, both on a disk, recomputed": ({"stage": 3, **BF16}, {"state": "nvme", "values": "nvme", "again": 2}),
    "fp16, state on the host": ({"stage": 1, **FP16}, {"state": "cpu"}),
    "fp32, values on a disk": ({"stage": 3}, {"values": "nvme"}),
}


def _places(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Without and with the option, in the same processes."""
    zeroengine.init_distributed(verbose=False)
    found: dict[str, Any] = {}
    for label, (base, place) in PLACES.items():
        base, place = dict(base), dict(place)
        stage, again = base.pop("stage"), place.pop("again", 0)
        engine = _engine(_config(folder, stage, **base), 2, schedule="zb-h1" if again else "1f1b")
        plain = _steps(engine), engine.full_state_dict()
        engine.destroy()
        engine = _engine(
            _config(folder, stage, **place, **base), 2, schedule="zb-h1" if again else "1f1b", activation_checkpoint_interval=again
        )
        away = _steps(engine), engine.full_state_dict()
        on_disk = engine.memory_report()["disk"]
        engine.destroy()
        found[label] = plain, away, on_disk
    found["overflows"] = _overflows(rank)
    found["unread"] = _unread(rank, folder)
    return found


def _unread(rank: int, folder: str) -> dict[str, Any]:
    """The values of the second stage are damaged on one of its ranks, and mended later."""
    found: dict[str, Any] = {}
    for schedule in ("1f1b", "zb-v"):
        engine = _engine(_config(folder, 3, values="nvme"), 2, schedule=schedule)
        want = _steps(engine)[1:]
        engine.destroy()
        engine = _engine(_config(folder, 3, values="nvme"), 2, schedule=schedule)
        _steps(engine, 0, 1)
        (store,) = engine.mechanism.placement.stores
        store.flush()
        _flip(store.path if rank == 3 else None)
        begin = time.monotonic()
        told = [_error_of(partial(_steps, engine, 1, 1))]
        told.append(_error_of(partial(engine.eval_batch, common.batches(3, MICRO, engine.mesh.sample_group), MICRO)))
        seconds = time.monotonic() - begin
        _flip(store.path if rank == 3 else None)
        found[schedule] = told, seconds, want, _steps(engine, 1, STEPS - 1)
        engine.destroy()
    return found


def _flip(path: Path | None) -> None:
    """Changes a byte, or back."""
    if path is not None:
        with path.open("r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(_places, 4, str(tmp_path_factory.mktemp("disk")), timeout=200)


@pytest.mark.parametrize("label", PLACES)
def test_offload_and_recomputation_change_no_bit(places: list[Any], label: str) -> None:
    for plain, away, on_disk in (r[label] for r in places):
        assert plain[0] == away[0]
        assert (on_disk > 0) == ("disk" in label)
    (_, plain), (_, away), _ = places[0][label]
    assert all(torch.equal(plain[n], away[n]) for n in plain)


@pytest.mark.parametrize("label", PLACES)
def test_sixteen_bits_follow_one_process(places: list[Any], label: str) -> None:
    """fp32, on the batches of both data-parallel ranks."""
    want_losses, _, want_norms = common.single(MICRO, 2, STEPS, clip=0.5)
    exact = 2e-2 if "16" in label else 1e-5
    for steps, _ in (r[label][0] for r in places):
        assert [loss for loss, _ in steps] == pytest.approx(want_losses, rel=exact)
        assert [norm for _, norm in steps] == pytest.approx(want_norms, rel=5 * exact)


# --- one decision ---------------------------------------------------------------------------------------------------------


def _overflows(rank: int) -> list[Any]:
    """An infinite gradient in one stage, of one data-parallel rank, in the second step."""
    found = []
    for kind, bad in ((FP16, 3), (BF16, 0)):
        engine = _engine(_config("", 2, **kind), 2)
        before = engine.loss_scale
        engine.train_batch(common.batches(0, MICRO, rank % 2))
        weights = engine.full_state_dict()
        handle = None
        if rank == bad:
            p = next(p for n, p in engine.module.named_parameters() if "up.weight" in n)
            handle = p.register_hook(lambda grad: grad * float("inf"))
        engine.train_batch(common.batches(1, MICRO, rank % 2))
        applied, scale = engine.was_step_applied(), engine.loss_scale
        if handle is not None:
            handle.remove()
        after = engine.full_state_dict()
        same = after is None or all(torch.equal(after[n], v) for n, v in weights.items())
        engine.train_batch(common.batches(2, MICRO, rank % 2))
        found.append((applied, engine.skipped_steps, scale / before, same, engine.was_step_applied()))
        engine.destroy()
    return found


def test_an_overflow_in_one_stage_is_skipped_by_all(places: list[Any]) -> None:
    for fp16, bf16 in (found["overflows"] for found in places):
        assert fp16 == (False, 1, 0.5, True, True)
        assert bf16 == (False, 1, 1.0, True, True)


# --- a disk that fails on one stage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_weights_that_cannot_be_read_in_a_pass_are_an_error_of_all_stages(places: list[Any], schedule: str) -> None:
    """Training and evaluation; and when the disk is well again everybody goes on as if nothing had been."""
    first = places[0]["unread"][schedule][0]
    for told, seconds, want, again in (r["unread"][schedule] for r in places):
        assert told == first and seconds < 10
        assert all("rank 3 on" in text and "params.bin" in text and "the checksum is not that" in text for text in told), told
        assert again == want


def _error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except OffloadError as error:
        return str(error)
    return "no error"


def _faults(rank: int, world: int, folder: str) -> list[str]:
    """A folder that can be made on the first stage's rank only; then the state of the second stage is cut short."""
    zeroengine.init_distributed(verbose=False)
    where = folder if rank == 0 else f"{folder}/file/inside"
    told = [_error_of(lambda: _engine(_config(where, 1, state="nvme"), 2))]
    engine = _engine(_config(folder, 1, state="nvme", **BF16), 2)
    _steps(engine, 0, 2)
    (store,) = engine.mechanism.placement.stores
    store.flush()
    if rank == 1:
        os.truncate(store.path, 100)
    torch.distributed.barrier()
    told.append(_error_of(lambda: engine.save_checkpoint(f"{folder}/saved")))
    told.append(_error_of(lambda: _steps(engine, 2, 1)))
    return told


def test_a_disk_of_one_stage_stops_all_with_one_message(tmp_path: Path) -> None:
    """Neither a save nor a step is made on any."""
    (tmp_path / "file").touch()
    first, second = run_ranks(_faults, 2, str(tmp_path), timeout=60)
    assert first == second
    assert "rank 1 on" in first[0] and "file" in first[0]
    for told in first[1:]:
        assert "rank 1 on" in told and "optimizer.bin" in told and "the file ends before the data does" in told, told
    assert not (tmp_path / "saved" / "global_step2").exists()
