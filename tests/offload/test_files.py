"""File access, buffers, records and folders, without an engine."""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroengine.errors import OffloadError
from zeroengine.offload import limits
from zeroengine.offload.buffers import PAGE, Buffers, disk_bytes
from zeroengine.offload.faults import Faults
from zeroengine.offload.folder import RankFolder
from zeroengine.offload.home import at_hand
from zeroengine.offload.placement import OffloadRule, Placement
from zeroengine.offload.record import State
from zeroengine.offload.store import DiskStore
from zeroengine.ops.aio import DAMAGED, READ, SHORT, SUM, WRITE, FileIO, TransferError, file_io, sums_for

BLOCK = 2 * PAGE


@pytest.fixture(params=["native", "twin"])
def io(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileIO]:
    monkeypatch.setenv("ZE_OPS", request.param)
    made = file_io(3, BLOCK)
    assert made.implementation == request.param
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Any]:
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        yield file


def test_what_is_written_is_read_and_compared(io: FileIO, file: Any) -> None:
    data = disk_bytes(5 * PAGE).random_(0, 256)
    sums, others = sums_for(data.nbytes, BLOCK), sums_for(data.nbytes, BLOCK)
    assert len(sums) == 3
    io.begin(WRITE, file, data, PAGE, sums).wait()
    found = disk_bytes(5 * PAGE)
    transfer = io.begin(READ, file, found, PAGE, sums)
    transfer.wait()
    assert torch.equal(found, data)
    io.begin(SUM, file, found.zero_(), PAGE, others).wait()
    assert others == sums and torch.equal(found, data)
    os.pwrite(file.fileno(), bytes([int(data[BLOCK + 7]) ^ 4]), PAGE + BLOCK + 7)
    with pytest.raises(TransferError) as caught:
        io.begin(READ, file, found, PAGE, sums).wait()
    assert (caught.value.problem, caught.value.at) == (DAMAGED, BLOCK)


@pytest.mark.parametrize("end", [0, PAGE, 3 * PAGE + 100])
def test_a_file_that_ends_early(io: FileIO, file: Any, end: int) -> None:
    data = disk_bytes(4 * PAGE)
    sums = sums_for(data.nbytes, BLOCK)
    io.begin(WRITE, file, data, 0, sums).wait()
    os.ftruncate(file.fileno(), end)
    with pytest.raises(TransferError) as caught:
        io.begin(READ, file, data, 0, sums).wait()
    assert caught.value.problem == SHORT


def test_an_errno_of_the_system(io: FileIO, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as reader, pytest.raises(TransferError) as caught:
        io.begin(WRITE, reader, disk_bytes(PAGE), 0, sums_for(PAGE, BLOCK)).wait()
    assert caught.value.problem == errno.EBADF


def test_checksums_see_changes_exchanges_and_zeros() -> None:
    from zeroengine.ops.registry import choose

    dll: Any = choose("aio", torch.device("cpu")).dll
    dll.ze_aio_checksum.restype = __import__("ctypes").c_uint64

    def checksum(t: Tensor) -> int:
        c = __import__("ctypes")
        return int(dll.ze_aio_checksum(c.c_int64(t.data_ptr()), c.c_int64(t.nbytes)))

    data = torch.randint(0, 256, (PAGE + 5,), dtype=torch.uint8)
    seen = {checksum(data)}
    for i in (0, 7, 8, 31, 32, PAGE - 1, PAGE + 4):
        other = data.clone()
        other[i] ^= 128
        seen.add(checksum(other))
    swapped = data.clone()
    swapped[:32], swapped[32:64] = data[32:64], data[:32]
    lanes = data.clone()
    lanes[:8], lanes[8:16] = data[8:16], data[:8]
    seen |= {checksum(swapped), checksum(lanes), checksum(data[:-1]), checksum(torch.zeros(64, dtype=torch.uint8))}
    assert len(seen) == 12 and checksum(torch.zeros(64, dtype=torch.uint8)) != checksum(torch.zeros(96, dtype=torch.uint8))


def test_buffers_are_bounded_and_grow() -> None:
    buffers = Buffers(2, disk_bytes)
    first, second = buffers.take(100), buffers.take(PAGE + 1)
    assert not buffers.available() and buffers.bytes() == 3 * PAGE
    beyond = buffers.take(10)
    buffers.give(beyond)  # not kept
    assert not buffers.available() and buffers.bytes() == 3 * PAGE
    buffers.give(first)
    assert buffers.take(PAGE + 1).numel() >= PAGE + 1  # the small one was exchanged
    buffers.give(second)
    assert buffers.bytes() == 4 * PAGE
    assert second.data_ptr() % PAGE == 0


def test_a_forked_child_shares_no_page_with_a_disk() -> None:
    """Else a transfer that is under way ends in a page that only the child has. The kernel's flag of memory that forks leave out."""
    memory = disk_bytes(3 * PAGE)
    here = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match("([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            here = int(bounds[1], 16) <= memory.data_ptr() < int(bounds[2], 16)
        elif here and line.startswith("VmFlags"):
            assert "dc" in line.split()
            return
    raise AssertionError("the memory is not in the map of the process")


def odd(nbytes: int) -> Tensor:
    """Memory that begins anywhere."""
    return torch.empty(nbytes + 8, dtype=torch.uint8)[8:]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(RankFolder(tmp_path, 3), "records.bin", file_io(2, BLOCK), Buffers(2, odd))
    yield made
    made.close()
    made.folder.remove()
    assert not list(tmp_path.iterdir())


def test_records_keep_values_and_objects(store: DiskStore) -> None:
    tensors = [torch.randn(37), torch.randn(3, 5, dtype=torch.float64), torch.arange(7, dtype=torch.int16)]
    view = torch.nn.Parameter(tensors[0][5:9].detach())
    wanted = [t.clone() for t in tensors]
    record = store.record("some tensors", lambda: tensors)
    record.alias(view, tensors[0], 5 * 4)
    with at_hand(record, changed=True):
        pass
    assert record.state is State.GOING and record.stored == sum(t.nbytes for t in wanted)
    store.flush()
    assert record.state is State.AWAY and bool(tensors[0].isnan().all()) and tensors[1].shape == (3, 5)
    with pytest.raises(RuntimeError):
        tensors[0].add_(1)
    record.ahead()
    with at_hand(record, changed=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
        with torch.no_grad():
            view.mul_(3)
        tensors.append(torch.full((2,), 8.0))  # one more, as an optimizer makes state
    wanted[0][5:9] *= 3
    with at_hand(record, changed=False), at_hand(record, changed=False):
        assert torch.equal(tensors[0], wanted[0]) and torch.equal(tensors[3], torch.full((2,), 8.0))
    del tensors[1]
    with at_hand(record, changed=True):
        pass
    assert record.stored == 37 * 4 + 14 + 8
    left, tensors[:] = tensors[2], tensors[2:]  # the first chunk is empty now
    with at_hand(record, changed=True):
        pass
    with at_hand(record, changed=False):
        assert torch.equal(left, torch.full((2,), 8.0)) and record.stored == 8


def test_many_records_pass_through_few_buffers(store: DiskStore) -> None:
    tensors = [torch.full((2000 + i,), float(i)) for i in range(9)]
    records = [store.record(f"tensor {i}", lambda t=t: [t]) for i, t in enumerate(tensors)]
    for _ in range(3):
        for i, record in enumerate(records):
            for later in records[i + 1 : i + 3]:
                later.ahead()
            with at_hand(record, changed=True):
                tensors[i] += 1
            assert store.buffers.bytes() <= 2 * 3 * PAGE
    for i, record in enumerate(records):
        with at_hand(record, changed=False):
            assert bool((tensors[i] == i + 3).all())


def test_the_file_within_reach(store: DiskStore) -> None:
    tensors = [torch.full((3000,), float(i)) for i in range(5)]
    records = [store.record(f"tensor {i}", lambda t=t: [t]) for i, t in enumerate(tensors)]
    for record in records:
        with at_hand(record, changed=True):
            pass
    with store.exposed(write=False):
        assert all(bool((t == i).all()) for i, t in enumerate(tensors))
    more: list[Tensor] = []
    new = store.record("new", lambda: more)
    with store.exposed(write=True), store.exposed(write=True):
        for t in tensors:
            t += 10
        with at_hand(new, changed=True):
            more.append(torch.full((5,), 3.0))
    assert bool(tensors[0].isnan().all()) and bool(more[0].isnan().all())
    for i, record in enumerate(records):
        with at_hand(record, changed=False):
            assert bool((tensors[i] == i + 10).all())
    with at_hand(new, changed=False):
        assert bool((more[0] == 3).all())
    with store.path.open("r+b") as other:
        other.seek(100)
        other.write(b"x")
    with pytest.raises(OffloadError, match="rank 3 on .* checksum"), store.exposed(write=False):
        pass


def test_a_write_that_failed_keeps_the_values(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3000)
    wanted = tensor.clone()
    record = store.record("a tensor", lambda: [tensor])
    good, bad = store.file, open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    store.file = bad
    with at_hand(record, changed=True):
        pass
    with pytest.raises(OffloadError, match="cannot store a tensor .*free some space"):
        store.flush()
    assert record.state is State.KEPT
    with pytest.raises(OffloadError, match="cannot store"), store.exposed(write=True):
        pass
    store.file = good
    with store.exposed(write=False):
        assert torch.equal(tensor, wanted)
    with at_hand(record, changed=False):  # and it is written again
        assert torch.equal(tensor, wanted)
    store.flush()
    with at_hand(record, changed=False):
        assert torch.equal(tensor, wanted)
    bad.close()


def test_room_in_the_file_is_used_again(store: DiskStore) -> None:
    for _ in range(4):
        tensors = [torch.randn(3000), torch.randn(9000)]
        records = [store.record("passing", lambda t=t: [t]) for t in tensors]
        for record in records:
            with at_hand(record, changed=True):
                pass
        for record in records:
            store.release(record)
    assert store._end == 12 * 1024 + 36 * 1024 and not store.records


def test_a_folder_ends_with_its_process_or_its_object(tmp_path: Path) -> None:
    code = f"""
from zeroengine.offload.folder import RankFolder
import os, sys
folder = RankFolder({str(tmp_path)!r}, 0)
(folder.path / "optimizer.bin").write_bytes(b"data")
print(folder.path.name, flush=True)
if sys.argv[1] == "killed":
    os._exit(0)
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert folder.there()
"""
    for how in ("ended", "killed"):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert [p.name for p in tmp_path.iterdir()] == ([done.stdout.strip()] if how == "killed" else [])
    folder, other = RankFolder(tmp_path, 0), RankFolder(tmp_path, 0)  # and what was left is gone
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([folder.path.name, other.path.name])
    del other
    gc.collect()
    assert [p for p in tmp_path.iterdir()] == [folder.path]
    folder.remove()


def test_which_buckets_leave_the_device() -> None:
    for ratio, expected in ((1.0, [True] * 8), (0.0, [False] * 8), (0.5, 4), (0.25, 2)):
        rule = OffloadRule("cpu", ratio=ratio)
        placement = Placement(torch.device("cpu"), 0, rule, OffloadRule())
        chosen = [placement.moves_state(100) for _ in range(8)]
        assert chosen == expected or sum(chosen) == expected
        for i in range(8):
            placement.choose(i, 100, "")
        assert not any(placement.on_host(i) for i in range(8))  # the device is the host


def test_activations_go_where_each_call_wants_them(tmp_path: Path) -> None:
    placement = Placement.on_device(torch.device("cpu"))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    stores = [placement.activation_store(base, count, True) for base, count in ((one, 2), (two, 2), (one, 3), (one, 2))]
    assert [(s.folder.asked, s.buffers.count) for s in stores] == [(one, 2), (two, 2), (one, 3), (one, 2)]
    assert stores[3] is stores[0] and len(placement.stores) == 3
    placement.close()
    assert not any(list(Path(base).iterdir()) for base in (one, two))


@pytest.mark.parametrize(
    ("stage", "state", "values", "link", "made"),
    [
        (1, {"device": "nvme", "pin_memory": False}, {}, False, {"optimizer": False}),
        (3, {"device": "cpu", "pin_memory": False}, {}, False, {}),
        (3, {"device": "nvme"}, {"device": "nvme", "pin_memory": False}, True, {"optimizer": True, "params": False}),
        (3, {"device": "nvme", "pin_memory": False}, {"device": "nvme"}, True, {"optimizer": False, "params": True}),
    ],
)
def test_each_section_decides_what_is_page_locked_for_it(
    stage: int, state: dict[str, Any], values: dict[str, Any], link: bool, made: dict[str, bool], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a device that is not the host; unlike keys of a section that is not used."""
    from zeroengine.comm.local import LocalCommunicator
    from zeroengine.config import Config
    from zeroengine.engine.mechanism import offload_rules

    locked: list[int] = []
    monkeypatch.setattr("zeroengine.offload.placement.pinned_bytes", lambda nbytes: locked.append(nbytes) or disk_bytes(nbytes))
    sections = {"offload_optimizer": {**state, "nvme_path": str(tmp_path)}, "offload_param": {**values, "nvme_path": str(tmp_path)}}
    config = Config.load({"zero_optimization": {"stage": stage, **sections}})
    placement = Placement(torch.device("meta"), 0, *offload_rules(config))
    control = LocalCommunicator("control", 0)
    placement.open(control, control)
    found = {}
    for name, store in placement._stores.items():
        locked.clear()
        store.buffers.take(PAGE)
        found[name] = bool(locked)
    placement.close()
    assert (placement.link._pin, found) == (link, made)


def test_limits_of_a_control_group(tmp_path: Path) -> None:
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("0::/job/step\n")
    for folder, limit in ((tmp_path / "job", "1000000000"), (inner, "max")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("900000000")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 30000000\nactive_file 20000000\n")
    room = limits._control_group(tmp_path, own)
    assert room is not None and room.nbytes == 150_000_000 and "job" in room.limit
    assert limits.too_much(140_000_000, [room]) is None and limits.too_much(160_000_000, [room]) is room


def test_faults_of_one_rank_are_those_of_all() -> None:
    from zeroengine.comm.local import LocalCommunicator

    faults, control = Faults(), LocalCommunicator("control", 0)
    faults.agree(control, "nothing")
    with faults.kept():
        raise OffloadError("rank 0: first")
    with faults.kept():
        raise OffloadError("rank 0: second")
    with pytest.raises(OffloadError, match=r"^doing: rank 0: first\. Do that$"):
        faults.agree(control, "doing", "Do that")
    faults.agree(control, "nothing")


def test_too_few_threads_are_an_error() -> None:
    """And not the end of the process, which a thread that nobody joined would be."""
    code = """
import resource
import torch
from zeroengine.ops.aio import file_io
from zeroengine.ops.registry import choose
choose("aio", torch.device("cpu"))
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
try:
    file_io(64, 4096)
except OSError as error:
    print("OSError", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("OSError"), done
