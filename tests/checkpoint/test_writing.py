"""What a save writes with: sums, copies, files in blocks, memory that is kept; and how much memory it takes."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from tests.checkpoint.common import ALONE
from tests.ranks import run_ranks
from zeroengine.checkpoint import BackgroundSaver, save
from zeroengine.checkpoint.staging import StagingMemory
from zeroengine.checkpoint.storage import sum_of
from zeroengine.checkpoint.stream import BLOCK, BlockWriter, SummedFile
from zeroengine.ops import aio
from zeroengine.ops.aio import TransferError, copy_away, crc32
from zeroengine.zero.layout import Piece


@pytest.fixture(params=["native", "twin"])
def ops(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ZE_OPS", request.param)
    return str(request.param)


def test_sums_are_those_of_zlib(ops: str) -> None:
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    plain = bytes(data.tolist())
    for size in (*range(140), 1000, 4095, 4096, 65_537):
        for start in (0, 1, 13):
            before = zlib.crc32(plain[:start], 77)
            assert crc32(data[start : start + size], before) == zlib.crc32(plain[start : start + size], before), (size, start)


def test_copies_are_exact_and_touch_nothing_else(ops: str) -> None:
    source = torch.randint(1, 256, (5000,), dtype=torch.uint8)
    for size in (0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, 4096):
        for to, at in ((0, 0), (1, 0), (16, 3), (63, 64)):
            target = torch.zeros(5000, dtype=torch.uint8)
            copy_away(target[to : to + size], source[at : at + size])
            assert torch.equal(target[to : to + size], source[at : at + size])
            assert int((target != 0).sum()) == size
    half = torch.zeros(6)
    copy_away(half, torch.arange(12.0)[::2])
    assert half.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 4097])
def test_files_in_blocks(tmp_path: Path, ops: str, size: int) -> None:
    data = bytes(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy())
    writer = BlockWriter()
    with SummedFile(tmp_path / "f", writer) as file:
        at = 0
        for step in (1, 70_000, size):
            assert file.tell() == at
            at += file.write(data[at : at + step])
    writer.close()
    assert (tmp_path / "f").read_bytes() == data
    assert (file.size, file.crc) == (size, zlib.crc32(data)) == sum_of(tmp_path / "f")


def test_a_file_system_that_takes_direct_files_but_no_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def wait(self) -> None:
            raise TransferError(errno.EINVAL, 0)

    class Refusing:
        implementation, block = "refusing", BLOCK

        def begin(self, *_: Any) -> Refused:
            return Refused()

        def close(self) -> None: ...

    monkeypatch.setattr(aio, "file_io", lambda threads, block: Refusing())
    data = os.urandom(BLOCK + 5)
    with SummedFile(tmp_path / "f", BlockWriter()) as file:
        file.write(data)
    assert (tmp_path / "f").read_bytes() == data and file.crc == zlib.crc32(data)


def test_an_error_names_the_file_and_ends_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BlockWriter()
    with pytest.raises(OSError, match="f'"), SummedFile(tmp_path / "f", writer) as file:
        file.write(bytes(BLOCK))
        os.dup2(os.open(tmp_path / "f", os.O_RDONLY), file._file.fileno())
        file.write(bytes(6 * BLOCK))
    with SummedFile(tmp_path / "g", writer) as file:  # the blocks are free again
        file.write(bytes(6 * BLOCK))
    assert file.size == 6 * BLOCK


def _pieces(*values: float) -> dict[str, list[Piece]]:
    return {f"k{i}": [Piece(f"p{i}", torch.Size((1000,)), 10, torch.full((900,), v))] for i, v in enumerate(values)}


def test_staging_memory_is_kept_and_grows() -> None:
    memory = StagingMemory()

    def at_once(key: str) -> bool:
        return False

    first, none = memory.stage(_pieces(1, 2), at_once)
    assert not none
    at, size = first["k0"][0].data.data_ptr(), memory.nbytes
    assert [p.data.unique().tolist() for parts in first.values() for p in parts] == [[1], [2]]
    memory.release()
    second, [(target, source)] = memory.stage(_pieces(3, 4), lambda key: key == "k1")
    assert second["k0"][0].data.data_ptr() == at and memory.nbytes == size
    target.copy_(source)  # what waits is the second one
    assert [(p.data.unique().tolist(), p.start) for parts in second.values() for p in parts] == [([3], 10), ([4], 10)]
    del first, second, target, source
    assert memory.stage(_pieces(5, 6, 7), at_once)[0]["k2"][0].data.unique().tolist() == [7] and memory.nbytes > size
    memory.close()
    assert memory.nbytes == 0


def test_staging_for_an_accelerator_where_the_host_gives_no_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("no page-locked memory")

    monkeypatch.setattr(torch, "empty", refused)
    assert StagingMemory()._room(100_000, pin=True).fill_(1).sum() == 100_000


_MIB = 1 << 20
_BUCKET = 48 * _MIB


def _growth(rank: int, world: int, folder: str) -> dict[str, list[int]]:
    """Bytes by which this process grows in saves of one bucket of eight parameters."""
    flat = torch.ones(_BUCKET // 4)
    each = flat.numel() // 8
    tensors = {f"model.w{i}": [Piece(f"w{i}", torch.Size((each,)), 0, flat[i * each : (i + 1) * each])] for i in range(8)}
    background = BackgroundSaver()

    def blocking() -> None:
        save(Path(folder) / "a", tensors, {}, {}, **ALONE)

    def aside() -> None:
        background.start(Path(folder) / "b", tensors, {}, {})
        background.wait()

    save(Path(folder) / "a", {"model.w": [Piece("w", torch.Size((4,)), 0, torch.ones(4))]}, {}, {}, **ALONE)  # imports
    found: dict[str, list[int]] = {"blocking": [], "aside": []}
    for name, run in (("blocking", blocking), ("blocking", blocking), ("aside", aside), ("aside", aside)):
        before = resident_bytes() or 0
        if not reset_peak():
            return {}
        run()
        found[name].append((peak_bytes() or 0) - before)
    background.close()
    return found


def test_memory_of_a_save_is_less_than_a_bucket(tmp_path: Path) -> None:
    """A bounded number of blocks, whatever is saved; in the background a copy beside them."""
    [found] = run_ranks(_growth, 1, str(tmp_path), timeout=60)
    if not found:
        pytest.skip("this kernel does not let a process reset its peak of memory")
    blocks = _BUCKET // 2
    assert max(found["blocking"]) < blocks, found
    assert max(found["aside"]) < _BUCKET + blocks, found
