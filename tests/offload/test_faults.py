"""What a failing disk does: the same clear error on all ranks, and never a wrong checkpoint."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offload.runs import Plan, advance, start
from tests.ranks import run_ranks
from zeroengine.errors import OffloadError

DISK = {"device": "nvme", "buffer_count": 2}
LAZY = {**DISK, "fast_init": True}
BAD = 1  # the rank whose disk fails


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except OffloadError as error:
        return str(error)
    return "no error"


def file_of(engine: Any, name: str) -> Path:
    (path,) = [s.path for s in engine.mechanism.placement.stores if s.path.name == name]
    return Path(path)


def _no_folder(rank: int, world: int, folder: str) -> str:
    Path(folder, "file").touch()
    mine = f"{folder}/file/below" if rank == BAD else folder
    told = error_of(lambda: start(Plan(2, DISK), mine))
    return told


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    for told in run_ranks(_no_folder, 2, str(tmp_path), timeout=60):
        assert f"rank {BAD} on" in told and "file/below" in told and "choose another folder" in told


def _small_disk(rank: int, world: int, folder: str) -> str:
    if rank == BAD:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    return error_of(lambda: start(Plan(2, DISK), folder))


def test_a_disk_that_is_too_small_is_found_at_the_start(tmp_path: Path) -> None:
    for told in run_ranks(_small_disk, 2, str(tmp_path), timeout=60):
        assert f"rank {BAD} on" in told and "optimizer.bin" in told and "raise the limit or choose another folder" in told


def _full_in_a_step(rank: int, world: int, folder: str, optimizer: str) -> list[str]:
    faults = []
    source: Any = optimizer if optimizer == "unknown" else {"type": optimizer, "params": {"lr": 1e-2}}
    plan = Plan(2, LAZY, optimizer=source, dtype="bf16")
    reference = start(Plan(2, optimizer=source, dtype="bf16"), folder)
    expected = advance(reference, rank, 0, 4)
    reference.destroy()
    engine = start(plan, folder)
    advance(engine, rank, 0, 2)
    saved = f"{folder}/saved"
    engine.save_checkpoint(saved)
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == BAD:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    told = error_of(lambda: [advance(engine, rank, step, 1) for step in (2, 3, 4)])
    if not (f"rank {BAD} on" in told and "cannot store" in told and "Load the last checkpoint" in told):
        faults.append(f"update: {told}")
    engine.load_checkpoint(f"{folder}/nothing")  # nothing is there, so nothing is mended
    for what, act in {"save": lambda: engine.save_checkpoint(saved, "torn"), "step": lambda: advance(engine, rank, 4, 1)}.items():
        if "of different steps" not in (told := error_of(act)):
            faults.append(f"{what}: {told}")
    resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    if sorted(p.name for p in Path(saved).iterdir() if p.is_dir()) != ["global_step2"]:
        faults.append(f"checkpoints: {list(Path(saved).iterdir())}")
    engine.load_checkpoint(saved)
    if (again := advance(engine, rank, 2, 2)) != (expected[0][2:], expected[1][2:]):
        faults.append(f"after loading {again} instead of {expected}")
    engine.destroy()
    return faults


@pytest.mark.parametrize("optimizer", ["AdamW", "unknown"])
def test_a_disk_that_is_full_in_the_middle_of_a_step(optimizer: str, tmp_path: Path) -> None:
    assert run_ranks(_full_in_a_step, 2, str(tmp_path), optimizer, timeout=100) == [[], []]


def damage(engine: Any, how: str, name: str) -> None:
    path = file_of(engine, name)
    if how == "truncated":
        os.truncate(path, 100)
    elif how == "removed":
        shutil.rmtree(path.parent)
    else:
        for at in (0, 5000):
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


def _damaged(rank: int, world: int, folder: str, how: str) -> list[str]:
    engine = start(Plan(2, DISK, dtype="bf16"), folder)
    advance(engine, rank, 0, 2)
    for store in engine.mechanism.placement.stores:
        store.flush()
    if rank == BAD:
        damage(engine, how, "optimizer.bin")
    torch.distributed.barrier()
    saved = error_of(lambda: engine.save_checkpoint(f"{folder}/saved"))
    update = error_of(lambda: advance(engine, rank, 2, 1))
    complete = Path(folder, "saved", "global_step2").exists()
    return [saved, update, str(complete)]


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("how", ["truncated", "damaged"])
def test_files_that_are_not_what_was_written(how: str, twin: bool, tmp_path: Path) -> None:
    said = {"truncated": "the file ends before the data does", "damaged": "the checksum is not that of what was written"}[how]
    for saved, update, complete in run_ranks(_damaged, 2, str(tmp_path), how, timeout=60, env={"ZE_OPS": "twin"} if twin else None):
        for told in (saved, update):
            assert f"rank {BAD} on" in told and "optimizer.bin" in told and said in told, told
        assert complete == "False"


def test_a_folder_that_is_removed(tmp_path: Path) -> None:
    """The open file still has everything: a checkpoint can be saved, but no step is made."""
    for saved, update, complete in run_ranks(_damaged, 2, str(tmp_path), "removed", timeout=60):
        assert saved == "no error" and complete == "True"
        assert f"rank {BAD} on" in update and "the folder was removed" in update and "Nothing was changed" in update


def _values(rank: int, world: int, folder: str) -> tuple[str, float]:
    engine = start(Plan(3, None, DISK), folder)
    advance(engine, rank, 0, 2)
    for store in engine.mechanism.placement.stores:
        store.flush()
    if rank == BAD:
        damage(engine, "truncated", "params.bin")
    torch.distributed.barrier()
    begin = time.monotonic()
    return error_of(lambda: advance(engine, rank, 2, 1)), time.monotonic() - begin


def test_values_that_cannot_be_read(tmp_path: Path) -> None:
    for told, seconds in run_ranks(_values, 2, str(tmp_path), timeout=60):
        assert f"rank {BAD} on" in told and "the file ends before" in told, told
        assert seconds < 10  # of waiting for a rank that is gone


def _leaves(rank: int, world: int, folder: str) -> None:
    start(Plan(2, DISK), folder)  # and ends without a word


def _sweeps(rank: int, world: int, folder: str) -> list[str]:
    before = sorted(p.name for p in Path(folder).iterdir())
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    engine = start(Plan(2, DISK), folder)
    torch.distributed.barrier()
    there = sorted(p.name for p in Path(folder).iterdir())
    torch.distributed.barrier()
    engine.destroy()
    return [*before, "|", *there]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    run_ranks(_leaves, 2, str(tmp_path), timeout=60)
    for told in run_ranks(_sweeps, 2, str(tmp_path), timeout=60):
        before, there = told[: told.index("|")], told[told.index("|") + 1 :]
        assert len(before) == 2 and len(there) == 2 and not set(before) & set(there)
    assert not list(tmp_path.iterdir())
