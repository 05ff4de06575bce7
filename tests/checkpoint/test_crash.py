"""A process that is killed while it saves: whatever the moment, a whole checkpoint is left."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.common import ALONE, tiny, value_of
from tests.ranks import run_ranks
from zeroengine.checkpoint import find_checkpoint, load, save


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
    save(directory / tag, tiny(value), {"step": value}, {}, **ALONE)


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
        left = sorted(p.name for p in directory.iterdir() if p.name.startswith(".") and p.is_dir())
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
