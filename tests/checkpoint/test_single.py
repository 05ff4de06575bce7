"""One process without a process group: what is saved, found, refused and reported."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.common import ALONE, tiny, value_of
from zeroengine.checkpoint import complete_tags, find_checkpoint, load, save, write_latest
from zeroengine.errors import CheckpointError
from zeroengine.zero.layout import Piece


def _save(folder: Path, value: float, **more: Any) -> None:
    save(folder, tiny(value), {"step": int(value), **more}, {}, **ALONE)


def _load(folder: Path | None, **options: Any) -> float | None:
    assert folder is not None
    held = tiny(-1.0)
    found = load(folder, held, **ALONE, **options)
    assert found.replicated["step"] == value_of(held)
    return value_of(held)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(logging.getLogger("zeroengine"), "propagate", True)
    caplog.set_level(logging.WARNING, "zeroengine")
    yield caplog


def _visible(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_saves_and_finds_the_last(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "absent", **ALONE) is None
    for step in (1, 2):
        _save(tmp_path / f"global_step{step}", step)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert _visible(tmp_path) == ["global_step1", "global_step2", "latest"]
    assert complete_tags(tmp_path) == ["global_step2", "global_step1"]
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 2
    assert _load(find_checkpoint(tmp_path, "global_step1", **ALONE)) == 1
    write_latest(tmp_path, "global_step1")
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 1


def test_latest_stays_when_asked(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    save(tmp_path / "b", tiny(2), {"step": 2}, {}, **ALONE, latest=False)
    assert (tmp_path / "latest").read_text() == "a"


def test_the_same_tag_again_replaces_it(tmp_path: Path) -> None:
    _save(tmp_path / "t", 1)
    _save(tmp_path / "t", 2)
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 2
    assert _visible(tmp_path) == ["latest", "t"]


@pytest.mark.parametrize("kind", ["saving", "old"])
def test_a_crash_between_the_two_renames_loses_nothing(tmp_path: Path, kind: str) -> None:
    """The tag's only copy is then under a hidden name: it is found there, and a later save that fails keeps it."""
    _save(tmp_path / "t", 1)
    (tmp_path / "t").rename(tmp_path / f".t.{kind}-host-1-0a1b")
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 1
    assert _load(find_checkpoint(tmp_path, "t", **ALONE)) == 1
    with pytest.raises(CheckpointError, match="do not cover"):
        save(tmp_path / "t", {"w": []}, {}, {}, **ALONE)
    assert _load(find_checkpoint(tmp_path, "t", **ALONE)) == 1
    _save(tmp_path / "t", 2)
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 2 and _visible(tmp_path) == ["latest", "t"]


def test_remains_of_dead_processes_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname().replace("-", "_")
    names = {pid: f".other.saving-{host}-{pid}-0a1b" for pid in (dead.pid, os.getppid())}
    for name in names.values():
        (tmp_path / name).mkdir()
    _save(tmp_path / "t", 1)
    assert _visible(tmp_path) == [names[os.getppid()], "latest", "t"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("work of years")
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not replaced"):
        _save(tmp_path / "src", 1)
    assert _visible(tmp_path) == ["src"] and _visible(tmp_path / "src") == ["main.py"]


@pytest.mark.parametrize("tag", [".hidden", "latest", ".."])
def test_unusable_tags(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be the tag"):
        _save(tmp_path / tag, 1)


def _cut(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])


def _lose(folder: Path) -> None:
    next(folder.glob("*.distcp")).unlink()


def _unmark(folder: Path) -> None:
    (folder / "complete.json").unlink()


def _spoil_marker(folder: Path) -> None:
    (folder / "complete.json").write_text("{")


BREAKS = {_cut: "bytes instead of", _lose: "is missing", _unmark: "has no complete.json", _spoil_marker: "is damaged"}


@pytest.mark.parametrize(("break_it", "reason"), BREAKS.items())
def test_a_broken_one_is_skipped_with_a_warning(tmp_path: Path, warnings: pytest.LogCaptureFixture, break_it: Any, reason: str) -> None:
    for step in (3, 1, 2, 4):  # in order of time, not of name
        _save(tmp_path / f"global_step{step}", step)
    break_it(tmp_path / "global_step4")
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 2
    assert "global_step2, the newest complete checkpoint" in warnings.text and reason in warnings.text
    with pytest.raises(CheckpointError, match=f"{reason}.*complete ones: global_step2, global_step1, global_step3"):
        find_checkpoint(tmp_path, "global_step4", **ALONE)
    with pytest.raises(CheckpointError, match=reason):
        _load(tmp_path / "global_step4")
    _save(tmp_path / "global_step4", 5)
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 5


def test_only_broken_ones_left(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    _unmark(tmp_path / "a")
    with pytest.raises(CheckpointError, match="no complete checkpoint in .*has no complete.json"):
        find_checkpoint(tmp_path, **ALONE)
    with pytest.raises(CheckpointError, match="b does not exist"):
        find_checkpoint(tmp_path, "b", **ALONE)


def test_lost_pointer(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    _save(tmp_path / "a", 1)
    (tmp_path / "latest").unlink()
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 1
    assert "has no file 'latest'" in warnings.text
    (tmp_path / "latest").write_text("../outside")
    assert _load(find_checkpoint(tmp_path, **ALONE)) == 1


@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata", "replicated.pt", "rank_00000.pt"])
def test_one_wrong_bit_is_found_before_anything_is_touched(tmp_path: Path, pattern: str) -> None:
    _save(tmp_path / "a", 1)
    path = next((tmp_path / "a").glob(pattern))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    held = tiny(-1)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
        load(tmp_path / "a", held, **ALONE)
    assert value_of(held) == -1


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    marker = tmp_path / "a" / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99.*update zeroengine"):
        _load(tmp_path / "a")


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_the_index_runs_no_code(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    index, marker = tmp_path / "a" / ".metadata", tmp_path / "a" / "complete.json"
    index.write_bytes(pickle.dumps(_Evil(tmp_path / "touched")))
    fields = json.loads(marker.read_text())
    fields["files"][".metadata"][0] = index.stat().st_size
    marker.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged or not of a checkpoint.*which no index"):
        _load(tmp_path / "a", verify=False)
    assert not (tmp_path / "touched").exists()


def test_missing_and_unexpected_keys(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    held = tiny(-1)
    held["model.new"] = [Piece("new", torch.Size((2,)), 0, torch.full((2,), 7.0))]
    del held["model.b"]
    with pytest.raises(CheckpointError, match="missing keys: model.new; unexpected keys: model.b .*strict=False"):
        load(tmp_path / "a", held, **ALONE)
    assert value_of({"w": held["model.w"]}) == -1
    found = load(tmp_path / "a", held, **ALONE, strict=False)
    assert found.missing == ("model.new",) and found.unexpected == ("model.b",)
    assert value_of({"w": held["model.w"]}) == 1 and value_of({"new": held["model.new"]}) == 7
    del held["model.new"]
    assert load(tmp_path / "a", held, **ALONE, only=("model.w", "optim.")).unexpected == ()
    held["model.b"] = []  # wanted, though no piece of it is here
    assert load(tmp_path / "a", held, **ALONE).unexpected == ()


def test_shapes_and_kinds_must_fit(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    held = tiny(-1)
    held["model.w"] = [Piece("w", torch.Size((3, 2)), 0, torch.zeros(6))]
    held["model.b"] = [Piece("b", torch.Size((3,)), 0, torch.zeros(3, dtype=torch.int64))]
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "a", held, **ALONE, strict=False)
    assert "model.w has shape (2, 3) in the checkpoint and (3, 2) here" in str(caught.value)
    assert "model.b is torch.float32 in the checkpoint and torch.int64 here" in str(caught.value)


def test_floating_types_are_converted_and_reported(tmp_path: Path) -> None:
    _save(tmp_path / "a", 1)
    held = tiny(-1)
    held["model.b"] = [Piece("b", torch.Size((3,)), 0, torch.zeros(3, dtype=torch.bfloat16))]
    found = load(tmp_path / "a", held, **ALONE)
    assert found.converted == {"model.b": (torch.float32, torch.bfloat16)} and value_of(held) == 1


def _piece(start: int, numel: int, shape: tuple[int, ...] = (2, 3), **kind: Any) -> Piece:
    return Piece("w", torch.Size(shape), start, torch.zeros(numel, **kind))


BAD_PIECES = {
    "hole": ([_piece(0, 2), _piece(3, 3)], "do not cover these tensors: w"),
    "nothing": ([], "do not cover these tensors: w"),
    "overlap": ([_piece(0, 4), _piece(3, 3)], "both hold element 3"),
    "outside": ([_piece(3, 4)], r"elements \[3, 7\) of a tensor with 6"),
    "shapes": ([_piece(0, 3), _piece(3, 3, (6,))], "pieces of shapes"),
    "dtypes": ([_piece(0, 3), _piece(3, 3, dtype=torch.int32)], "pieces on one rank differ"),
    "matrix": ([Piece("w", torch.Size((2, 3)), 0, torch.zeros(2, 3))], "must be 1-D and contiguous"),
    "strided": ([Piece("w", torch.Size((2, 3)), 0, torch.zeros(12)[::2])], "must be 1-D and contiguous"),
}


@pytest.mark.parametrize(("parts", "reason"), BAD_PIECES.values(), ids=BAD_PIECES.keys())
def test_bad_pieces_are_refused_and_leave_nothing(tmp_path: Path, parts: list[Piece], reason: str) -> None:
    _save(tmp_path / "a", 1)
    with pytest.raises(CheckpointError, match=reason):
        save(tmp_path / "b", {"w": parts}, {}, {}, **ALONE)
    assert _visible(tmp_path) == ["a", "latest"] and _load(find_checkpoint(tmp_path, **ALONE)) == 1


def test_saving_copies_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t, **k: copies.append(t.shape) or clone(t, **k))
    flat = torch.arange(100.0)
    held = {"w": [Piece("w", torch.Size((5, 10)), 0, flat[3:53])], "v": [Piece("v", torch.Size((40,)), 0, flat[60:])]}
    save(tmp_path / "a", held, {}, {}, **ALONE)
    assert not copies


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    replicated = {
        "numbers": {"i": 1 << 80, "f": 0.1, "c": 1j, "inf": float("inf")},
        "containers": [(1, 2), {3}, {"a": [None, True, b"x"]}],
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "scalar": np.float32(1.5),
        "tensor": torch.arange(3, dtype=torch.bfloat16),
    }
    own = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    save(tmp_path / "a", tiny(1), replicated, own, **ALONE)
    found = load(tmp_path / "a", tiny(0), **ALONE)
    assert found.per_rank is not None
    for given, got in ((replicated, found.replicated), (own, found.per_rank)):
        assert list(given) == list(got)
        assert pickle.dumps(_plain(given)) == pickle.dumps(_plain(got))


def _plain(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return str(value.dtype), value.tolist()
    if isinstance(value, np.generic):
        return str(value.dtype), value.item()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return tuple(_plain(v) for v in value) if isinstance(value, tuple) else value


def test_other_objects_need_trust(tmp_path: Path) -> None:
    save(tmp_path / "a", tiny(1), {"step": 1, "client_state": argparse.Namespace(lr=3)}, {}, **ALONE)
    held = tiny(-1)
    with pytest.raises(CheckpointError, match=r"entries \['client_state'\] .*allow_pickle=True"):
        load(tmp_path / "a", held, **ALONE)
    assert value_of(held) == -1
    assert load(tmp_path / "a", held, **ALONE, allow_pickle=True).replicated["client_state"].lr == 3


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"replicated\['client_state'\] cannot be saved"):
        save(tmp_path / "a", tiny(1), {"client_state": lambda: 0}, {}, **ALONE)
    assert _visible(tmp_path) == []


def test_a_path_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another folder"):
        _save(tmp_path / "file" / "a", 1)


def test_a_rank_outside_its_world(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 1 does not lie in a world of 1"):
        save(tmp_path / "a", {}, {}, {}, process_group=None, rank=1, world=1)
    with pytest.raises(CheckpointError, match="2 ranks need an initialised process group"):
        save(tmp_path / "a", {}, {}, {}, process_group=None, rank=0, world=2)


def test_nothing_but_values(tmp_path: Path) -> None:
    save(tmp_path / "a", {}, {"step": 1}, {}, **ALONE)
    assert load(tmp_path / "a", {}, **ALONE).replicated == {"step": 1}
