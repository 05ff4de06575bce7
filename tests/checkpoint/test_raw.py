"""Tensors read in part: every range of every shape, of other types, from files that others wrote, and only what is wanted."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.common import ALONE
from zeroengine.checkpoint import load, save
from zeroengine.checkpoint import raw as raw_module
from zeroengine.checkpoint.raw import RawFile
from zeroengine.checkpoint.storage import SafeReader
from zeroengine.errors import CheckpointError
from zeroengine.zero.layout import Piece

SHAPES = [(), (1,), (7,), (1, 17), (5, 3), (3, 1, 4), (2, 3, 4, 5), (1, 1, 6), (0,), (4, 0)]


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32) + 0.5


@pytest.mark.parametrize("chunk", [4, 40, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int) -> None:
    """Pieces begin and end anywhere: inside rows, over several of them."""
    monkeypatch.setattr(raw_module, "_CHUNK", chunk)
    names = {f"model.t{i}": torch.Size(shape) for i, shape in enumerate(SHAPES)}
    save(tmp_path / "a", {k: [Piece(k, s, 0, _values(s))] for k, s in names.items()}, {}, {}, **ALONE)
    draw = random.Random(3)
    for _ in range(12):
        wanted = {}
        for key, shape in names.items():
            start, end = sorted(draw.sample(range(shape.numel() + 1), 2)) if shape.numel() > 1 else (0, shape.numel())
            wanted[key] = [Piece(key, shape, start, torch.full((end - start,), -1.0, dtype=dtype))]
        load(tmp_path / "a", wanted, **ALONE)
        for key, [piece] in wanted.items():
            expected = _values(names[key])[piece.start : piece.start + piece.data.numel()]
            assert torch.equal(piece.data, expected.to(dtype)), (key, piece.start)


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.Size((1000, 250))
    save(tmp_path / "a", {"model.w": [Piece("w", rows, 0, _values(rows))]}, {}, {}, **ALONE)
    read: list[int] = []
    original = RawFile._read

    def counted(self: RawFile, target: torch.Tensor, at: int) -> None:
        read.append(target.nbytes)
        original(self, target, at)

    monkeypatch.setattr(RawFile, "_read", counted)
    piece = Piece("w", rows, 250 * 100 + 7, torch.zeros(250 * 50))
    load(tmp_path / "a", {"model.w": [piece]}, **ALONE)
    assert torch.equal(piece.data, _values(rows)[piece.start : piece.start + piece.data.numel()])
    assert sum(read) <= piece.data.nbytes + 2 * 1000


def test_what_others_wrote(tmp_path: Path) -> None:
    """Tensors whose memory is not in order, of other types, and objects that are no tensors."""
    state = {
        "turned": torch.arange(12.0).view(3, 4).t(),
        "whole numbers": torch.arange(5, dtype=torch.int16),
        "truth": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "part": torch.arange(100.0)[10:20],
        "words": ["a", 1],
    }
    dcp.save(dict(state), checkpoint_id=tmp_path / "a", no_dist=True)
    found = {k: torch.zeros_like(v).contiguous() if isinstance(v, torch.Tensor) else None for k, v in state.items()}
    dcp.load(found, storage_reader=SafeReader(tmp_path / "a"), no_dist=True)
    for key, value in state.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"\0" * 10)
    with RawFile(tmp_path / "short") as file, pytest.raises(CheckpointError, match="short ends at byte 10, inside a tensor"):
        file.fill(torch.zeros(4), 0, (4,), (0,), torch.float32)
    (tmp_path / "junk").write_bytes(b"x" * 300)
    with RawFile(tmp_path / "junk") as file:
        assert file.values_at(0, 300, (4,), torch.float32) is None
