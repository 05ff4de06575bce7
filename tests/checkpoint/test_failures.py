"""One rank that cannot do its part: every rank hears of it, the last checkpoint stays, and the job goes on."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.common import ALONE, group, start, tiny, value_of
from tests.ranks import run_ranks
from zeroengine.checkpoint import find_checkpoint, load, save
from zeroengine.errors import CheckpointError
from zeroengine.zero.layout import Piece

BIG = 200_000


def _halves(rank: int, value: float, start: int | None = None) -> dict[str, list[Piece]]:
    at = BIG // 2 * rank if start is None else start
    return {"model.w": [Piece("w", torch.Size((BIG // 100, 100)), at, torch.full((BIG // 2,), float(value)))]}


@contextmanager
def _full_disk(rank: int) -> Iterator[None]:
    """Rank 1 can write no file of more than 100 kB: the operating system itself refuses."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def _interrupt(rank: int, directory: Path) -> Iterator[None]:
    """Ctrl-C reaches rank 1 when it opens its file of tensors."""
    armed = [rank == 1]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if armed and armed[0] and event == "open" and str(args[0]).endswith(".distcp"):
            armed.clear()
            raise KeyboardInterrupt

    sys.addaudithook(hook)
    yield
    armed.clear()


def _cannot_write(d: Path, rank: int, kw: dict[str, Any]) -> None:
    with _full_disk(rank):
        save(d / "bad", _halves(rank, 2), {}, {}, **kw)


def _unsavable_value(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / "bad", _halves(rank, 2), {}, {"rng": (lambda: 0) if rank == 1 else 0}, **kw)


def _bad_piece(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / "bad", _halves(rank, 2, start=BIG if rank == 1 else 0), {}, {}, **kw)


def _other_ranges(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / "bad", _halves(rank, 2, start=rank), {}, {}, **kw)


def _uncovered(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / "bad", _halves(rank, 2) if rank == 1 else {"model.w": []}, {}, {}, **kw)


def _nobody_has_it(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / "bad", _halves(rank, 2) | {"model.gone": []}, {}, {}, **kw)


def _two_tags(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / f"bad{rank}", _halves(rank, 2), {}, {}, **kw)


def _under_a_file(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / "good" / "complete.json" / "bad", _halves(rank, 2), {}, {}, **kw)


def _node_local(d: Path, rank: int, kw: dict[str, Any]) -> None:
    save(d / f"node{rank}" / "bad", _halves(rank, 2), {}, {}, **kw)


def _interrupted(d: Path, rank: int, kw: dict[str, Any]) -> None:
    with _interrupt(rank, d):
        save(d / "bad", _halves(rank, 2), {}, {}, **kw)


def _missing_on_one(d: Path, rank: int, kw: dict[str, Any]) -> None:
    load(d / "good", _halves(rank, 0) | ({"model.new": []} if rank == 1 else {}), **kw)


def _shape_on_one(d: Path, rank: int, kw: dict[str, Any]) -> None:
    piece = Piece("w", torch.Size((BIG,)), 0, torch.zeros(BIG))
    load(d / "good", {"model.w": [piece]} if rank == 1 else _halves(rank, 0), **kw)


def _absent_tag(d: Path, rank: int, kw: dict[str, Any]) -> None:
    find_checkpoint(d, "absent", **kw)


# What each scenario must say, on rank 0 and on rank 1.
SCENARIOS: dict[Callable[[Path, int, dict[str, Any]], None], tuple[str, ...]] = {
    _cannot_write: ("CheckpointError: saving ", "rank 1: OSError", "File too large"),
    _unsavable_value: ("CheckpointError", "failed on rank 1: per_rank['rng'] cannot be saved"),
    _bad_piece: ("CheckpointError", "failed on rank 1: model.w: a piece holds elements [200000, 300000)"),
    _other_ranges: ("CheckpointError", "model.w has overlapping chunks"),
    _uncovered: ("CheckpointError", "model.w invalid fill"),
    _nobody_has_it: ("CheckpointError", "all 2 ranks: the ranks' pieces do not cover these tensors: model.gone"),
    _two_tags: ("CheckpointError", "rank 0: bad0, rank 1: bad1"),
    _under_a_file: ("CheckpointError", "failed on rank 0: ", "a file is in the way"),
    _node_local: ("CheckpointError", "failed on rank 1: ", "a file system that all nodes share"),
    _interrupted: ("KeyboardInterrupt",),
    _missing_on_one: ("CheckpointError", "missing keys: model.new"),
    _shape_on_one: ("CheckpointError", "failed on rank 1: ", "model.w has shape (2000, 100) in the checkpoint"),
    _absent_tag: ("CheckpointError", "absent does not exist (complete ones: good)"),
}


def _all_scenarios(rank: int, world: int, directory: str) -> dict[str, tuple[str, float | None, list[str]]]:
    """For each scenario: the error of this rank, the value loaded afterwards, and what is in the directory."""
    start(rank, world)
    kw, found = group(rank, world), {}
    save(Path(directory) / "good", _halves(rank, 1), {}, {}, **kw)
    for scenario in SCENARIOS:
        error = "no error"
        try:
            scenario(Path(directory), rank, kw)
        except (Exception, KeyboardInterrupt) as exc:
            error = f"{type(exc).__name__}: {exc}"
        folder = find_checkpoint(Path(directory), **kw)
        held = _halves(rank, -1)
        if folder is not None:
            load(folder, held, **kw)
        dist.barrier()
        found[scenario.__name__] = (error, value_of(held), sorted(os.listdir(directory)))
        dist.barrier()
    save(Path(directory) / "bad", _halves(rank, 3), {}, {}, **kw)
    held = _halves(rank, -1)
    load(Path(directory) / "bad", held, **kw)
    found["afterwards"] = ("", value_of(held), [])
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, float | None, list[str]]]]:
    return run_ranks(_all_scenarios, 2, str(tmp_path_factory.mktemp("failures")), timeout=120)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__.strip("_"))
def test_every_rank_hears_of_it_and_the_last_checkpoint_stays(outcomes: list[Any], scenario: Any) -> None:
    for rank, outcome in enumerate(outcomes):
        error, value, left = outcome[scenario.__name__]
        expected = SCENARIOS[scenario]
        if scenario is _interrupted and rank == 0:
            expected = ("CheckpointError", "failed on rank 1: KeyboardInterrupt")
        assert all(part in error for part in expected), f"rank {rank}: {error}"
        assert value == 1
        assert [name for name in left if not name.startswith("node")] == ["good", "latest"]


def test_the_job_can_save_after_all_these_errors(outcomes: list[Any]) -> None:
    assert [outcome["afterwards"][1] for outcome in outcomes] == [3, 3]


def _killed(rank: int, world: int, directory: str) -> str:
    start(rank, world)
    save(Path(directory) / "good", _halves(rank, 1), {}, {}, **group(rank, world))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if rank == 1 and event == "open" and str(args[0]).endswith(".distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        save(Path(directory) / "bad", _halves(rank, 2), {}, {}, **group(rank, world))
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def test_a_rank_that_is_killed_while_saving(tmp_path: Path) -> None:
    survivor, killed = run_ranks(_killed, 2, str(tmp_path), timeout=60, failures=True)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.value.startswith("RankError: rank 0 on ") and "another rank died" in survivor.value
    folder = find_checkpoint(tmp_path, **ALONE)
    assert folder == tmp_path / "good"
    held = {"model.w": [Piece("w", torch.Size((BIG // 100, 100)), 0, torch.zeros(BIG))]}
    load(folder, held, **ALONE)
    assert value_of(held) == 1


def test_a_pointer_that_cannot_move(tmp_path: Path) -> None:
    save(tmp_path / "a", tiny(1), {}, {}, **ALONE)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest"):
        save(tmp_path / "b", tiny(2), {}, {}, **ALONE)
    held = tiny(0)
    load(tmp_path / "a", held, **ALONE)
    assert value_of(held) == 1
