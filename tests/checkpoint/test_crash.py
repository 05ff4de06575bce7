"""A process that is killed while it saves: whatever the moment, a whole checkpoint is left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.common import ALONE, tiny, value_of
from tests.ranks import run_ranks
from zeroengine.checkpoint import find_checkpoint, load, save
from zeroengine.zero.layout import Piece


def _die_at(moment: int, directory: Path) -> None:
    """Kills this process right before its `moment`-th access to a file or folder under `directory`."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event.startswith(("open", "os.", "shutil.")) and any(str(a).startswith(str(directory)) for a in args):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _read(directory: Path) -> float | None:
    folder = find_checkpoint(directory, **ALONE)
    if folder is None:
        return None
    held = tiny(-1)
    found = load(folder, held, **ALONE)
    value = value_of(held)
    return value if value == found.replicated["step"] else None


def _save(directory: Path, tag: str, value: float) -> None:
    save(directory / tag, tiny(value), {"step": value}, {}, keep_last=1, **ALONE)


def _kill_at_random(rank: int, world: int, parent: str) -> list[str]:
    """50 saves of a few MB, each in a process that another one kills at a random moment."""
    problems, last, left = [], -1.0, []  # -1: nothing is there yet
    directory, draw = Path(parent) / "random", random.Random(5)
    size, longest = 400_000, 0.05

    def state(value: float) -> dict[str, list[Piece]]:
        return {"model.w": [Piece("w", torch.Size((size,)), 0, torch.full((size,), value))]}

    for n in range(1, 51):
        child = os.fork()
        if child == 0:
            save(directory / f"tag{n % 3}", state(float(n)), {"step": float(n)}, {}, keep_last=2, **ALONE)
            os._exit(0)
        began = time.monotonic()
        until = began + draw.uniform(0, longest)
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.0005)
        if done[0] == 0:
            os.kill(child, signal.SIGKILL)
            done = os.waitpid(child, 0)
            left.append(time.monotonic() - began)
        else:
            longest = max(0.01, time.monotonic() - began)
        folder = find_checkpoint(directory, **ALONE)
        held = state(-1.0)
        value = -1.0 if folder is None else load(folder, held, **ALONE).replicated["step"]
        if folder is not None and value_of(held) != value:
            problems.append(f"round {n}: a checkpoint of {value} holds {value_of(held)}")
        if value not in ((n,) if done[1] == 0 else (n, last)):
            problems.append(f"round {n}: {value} is what is left; before it was {last}")
        last = value
    if len(left) < 15:
        problems.append(f"only {len(left)} saves were killed")
    return problems


def test_killed_at_random_moments(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as parent:
        [problems] = run_ranks(_kill_at_random, 1, parent, timeout=120)
    assert not problems, "\n".join(problems)


def _kill_at_every_moment(rank: int, world: int, parent: str, before: str, during: str) -> tuple[list[str], set[float]]:
    """For each moment: a good save of value 1 as `before`, a killed one of value 2 as `during`, then what is there, and
    a save of value 3 under the same tag. Returns what went wrong, and the values found."""
    problems: list[str] = []
    values: set[float] = set()
    for moment in range(1, 500):
        directory = Path(parent) / str(moment)
        _save(directory, before, 1)
        child = os.fork()
        if child == 0:
            _die_at(moment, directory)
            _save(directory, during, 2)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        found = _read(directory)
        if found not in ((2,) if survived else (1, 2)):
            problems.append(f"killed at access {moment}: found {found}")
        values.add(found or 0)
        _save(directory, during, 3)
        if (found := _read(directory)) != 3:
            problems.append(f"saving again after a kill at access {moment}: found {found}")
        left = sorted(p.name for p in directory.iterdir() if p.name.startswith("."))
        if left:
            problems.append(f"left after a kill at access {moment} and another save: {left}")
        shutil.rmtree(directory)
        if survived:
            return problems, values
    return [*problems, "the save never ended"], values


@pytest.mark.parametrize(("before", "during"), [("global_step1", "global_step2"), ("same", "same")])
def test_killed_at_every_access_to_the_disk(tmp_path: Path, before: str, during: str) -> None:
    memory = Path("/dev/shm")  # hundreds of saves: spare the disk where the system has files in memory
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as parent:
        [(problems, values)] = run_ranks(_kill_at_every_moment, 1, parent, before, during, timeout=120)
    assert not problems, "\n".join(problems)
    assert values == {1, 2}, "the kills must fall both before and after the new checkpoint counts"
