"""The allocator of large CPU tensors: each test in a process of its own, which begins without it."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import random
import resource
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.toolbox import NEEDS_COMPILER, advised, needs_large_pages
from tests.ranks import run_ranks
from zeroengine.ops.against_torch import torch_flags
from zeroengine.ops.build import library
from zeroengine.ops.heap import Heap, find_heap

pytestmark = NEEDS_COMPILER

SMALLEST, LINE, PAGE, MIB = 1 << 16, 64, os.sysconf("SC_PAGE_SIZE"), 1 << 20
FLOAT = torch.float32.itemsize


def installed() -> Heap:
    heap = find_heap()
    assert heap is not None and heap.install()
    return heap


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class Model:
    """Tensors of bytes, what they must hold, and what the heap must say of them."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self.written: set[int] = set()  # pages that have memory
        heap.trim()
        self.check()

    def make(self, nbytes: int, value: int) -> None:
        self._add(torch.empty(nbytes, dtype=torch.uint8), value)

    def free(self, i: int) -> None:
        if self.tensors:
            self._filled(self.tensors.pop(i % len(self.tensors)))

    def resize(self, i: int, nbytes: int) -> None:
        if self.tensors:
            tensor, value = self.tensors.pop(i % len(self.tensors))
            kept = min(tensor.numel(), nbytes)
            tensor.untyped_storage().resize_(nbytes)
            self._filled((tensor[:kept], value))
            self._add(tensor.set_(tensor.untyped_storage(), 0, (nbytes,)), value)

    def trim(self) -> None:
        self.heap.trim()
        self.written = {page for tensor, _ in self._large() for page in self._pages(tensor)}

    def check(self) -> None:
        """Live blocks lie apart, at their alignment, hold what was written, and are what the heap counts."""
        end = 0
        for at, nbytes in sorted((t.data_ptr(), t.numel()) for t, _ in self.tensors if t.numel()):
            assert at % LINE == 0 and at >= end
            end = at + nbytes
        held = self.heap.held()
        assert held.live == sum(up(t.numel(), LINE) for t, _ in self._large())
        assert held.kept == PAGE * len(self.written)

    def end(self) -> None:
        while self.tensors:
            self.free(0)
        assert self.heap.held().live == 0

    def _add(self, tensor: torch.Tensor, value: int) -> None:
        self.tensors.append((tensor.fill_(value), value))
        if tensor.numel() >= SMALLEST:
            self.written.update(self._pages(tensor))

    def _large(self) -> list[tuple[torch.Tensor, int]]:
        return [(t, v) for t, v in self.tensors if t.numel() >= SMALLEST]

    @staticmethod
    def _pages(tensor: torch.Tensor) -> range:
        at = tensor.data_ptr()
        return range(at // PAGE, up(at + up(tensor.numel(), LINE), PAGE) // PAGE)

    @staticmethod
    def _filled(pair: tuple[torch.Tensor, int]) -> None:
        tensor, value = pair
        # a comparison in torch would be a tensor of the heap
        assert ctypes.string_at(tensor.data_ptr(), tensor.numel()) == bytes([value]) * tensor.numel()


SIZES = st.one_of(
    st.sampled_from([0, 1, SMALLEST - 1, SMALLEST, SMALLEST + 1, 2 * SMALLEST]),
    st.integers(0, 40 * PAGE),
    st.sampled_from([MIB - LINE, MIB, MIB + 1, 2 * MIB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), SIZES, st.integers(0, 255)),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("resize"), st.integers(0, 99), SIZES),
        st.tuples(st.just("trim")),
    ),
    max_size=60,
)


def _sequences(rank: int, world: int) -> None:
    heap = installed()

    @settings(max_examples=150, deadline=None, database=None)
    @given(STEPS)
    def holds(steps: list[tuple[Any, ...]]) -> None:
        model = Model(heap)
        for name, *arguments in steps:
            getattr(model, name)(*arguments)
            model.check()
        model.end()

    holds()


def test_random_sequences_keep_contents_and_counts() -> None:
    run_ranks(_sequences, 1)


def _holes(rank: int, world: int) -> None:
    """What is freed serves a block of the same size again, though small tensors are made in between."""
    heap = installed()
    sizes = [3 * MIB + 64 * i for i in range(8)]
    small, tensors = [], [torch.empty(n, dtype=torch.uint8) for n in sizes]
    kept = heap.held().kept
    for _ in range(20):
        for i, n in enumerate(sizes):
            tensors[i] = torch.empty(0)
            small.append(torch.empty(100))
            tensors[i] = torch.empty(n, dtype=torch.uint8)
    assert heap.held().kept == kept
    del tensors
    whole = torch.empty(sum(sizes), dtype=torch.uint8)  # the holes have become one
    assert heap.held().kept == kept, whole.shape


def test_a_hole_serves_its_own_size_again() -> None:
    run_ranks(_holes, 1)


def _ends_of_a_hole(rank: int, world: int) -> None:
    heap = installed()
    first, hole, last = (torch.empty(n, dtype=torch.uint8) for n in (2 * MIB, 5 * MIB, 2 * MIB))
    assert first.data_ptr() < hole.data_ptr() < last.data_ptr()  # at the end of all, large ones lie low, too
    at, kept = hole.data_ptr(), heap.held().kept
    del hole
    small = [torch.empty(n, dtype=torch.uint8) for n in (SMALLEST, MIB - LINE)]
    large = [torch.empty(n, dtype=torch.uint8) for n in (MIB, MIB + LINE)]
    for _ in range(2):
        assert [t.data_ptr() - at for t in small] == [0, SMALLEST]
        assert [t.data_ptr() - at for t in large] == [4 * MIB, 3 * MIB - LINE]
        large[1] = torch.empty(0)  # becomes one with what is free below
        large[1] = torch.empty(MIB + LINE, dtype=torch.uint8)
    rest = torch.empty(2 * MIB - SMALLEST, dtype=torch.uint8)  # all that is left in between
    assert rest.data_ptr() == at + MIB - LINE + SMALLEST
    large.clear()
    both = torch.empty(2 * MIB + LINE, dtype=torch.uint8)
    assert both.data_ptr() == at + 3 * MIB - LINE and heap.held().kept == kept


def test_small_and_large_blocks_take_different_ends_of_a_hole() -> None:
    run_ranks(_ends_of_a_hole, 1)


def _threads(rank: int, world: int) -> None:
    heap = installed()
    handed: queue.Queue[tuple[torch.Tensor, int]] = queue.Queue(maxsize=8)
    wrong: list[str] = []

    def make(seed: int) -> None:
        chosen = random.Random(seed)
        for i in range(300):
            value = (seed * 31 + i) % 251
            handed.put((torch.full((chosen.randrange(SMALLEST, 4 * SMALLEST),), value, dtype=torch.uint8), value))

    def free() -> None:
        for _ in range(300):
            tensor, value = handed.get()
            if not bool((tensor == value).all()):
                wrong.append(f"{value}")
            del tensor

    threads = [threading.Thread(target=make, args=(i,)) for i in range(4)] + [threading.Thread(target=free) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and heap.held().live == 0


def test_threads_free_what_others_made() -> None:
    run_ranks(_threads, 1)


def _forks(rank: int, world: int) -> None:
    """Children are forked while another thread is inside the allocator nearly all the time."""
    heap = installed()
    ended, held = threading.Event(), torch.full((MIB,), 7, dtype=torch.uint8)

    def busy() -> None:
        while not ended.is_set():
            torch.empty(SMALLEST)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(40):
            child = os.fork()
            if child == 0:
                other = torch.full((MIB,), 9, dtype=torch.uint8)
                right = int(held[-1]) == 7 and int(other[-1]) == 9
                del other
                heap.trim()
                os._exit(0 if right and int(held[0]) == 7 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        thread.join()
    assert bool((held == 7).all())


def test_a_forked_child_allocates() -> None:
    run_ranks(_forks, 1, timeout=60)


def _profiled(rank: int, world: int) -> None:
    installed()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        large, small = torch.empty(MIB), torch.empty(100)
        del large, small
    found = [e.cpu_memory_usage for e in profile.events() if e.name in ("aten::empty", "[memory]")]
    assert found.count(MIB * FLOAT) == 1 and found.count(100 * FLOAT) == 1 and found.count(-MIB * FLOAT) == 1, found


def test_the_profiler_sees_it() -> None:
    run_ranks(_profiled, 1)


def _edges(rank: int, world: int) -> None:
    heap = installed()
    assert torch.empty(0).data_ptr() == 0
    small = torch.empty(SMALLEST - 1, dtype=torch.uint8)
    assert heap.held() == heap.held().__class__(0, 0, 0), small.shape
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):  # as torch says it
        torch.empty(1 << 47, dtype=torch.uint8)
    tensor = torch.full((MIB,), 3.0)
    assert bool((tensor.clone() == 3).all()) and bool((torch.cat([tensor, tensor]) == 3).all())
    heap.uninstall()
    after = torch.empty(MIB)
    assert heap.held().live == MIB * FLOAT, after.shape
    assert bool((tensor == 3).all())
    tensor.resize_(2 * MIB)  # by the allocator that it came from
    assert heap.held().live == 2 * MIB * FLOAT
    del tensor
    assert heap.held().live == 0
    assert heap.install() and heap.install()
    again = torch.empty(MIB)
    assert heap.held().live == MIB * FLOAT, again.shape


def test_small_too_large_and_after_the_end() -> None:
    run_ranks(_edges, 1)


def _exhausted(rank: int, world: int) -> None:
    """More than the range has left is torch's own allocator's matter."""
    heap = find_heap()
    assert heap is not None
    with mock.patch("os.sysconf", lambda name: {"SC_PAGE_SIZE": PAGE, "SC_PHYS_PAGES": 8 * MIB // PAGE}[name]):
        assert heap.install()
    tensors = [torch.full((MIB,), float(i)) for i in range(5)]
    assert heap.held().live == 2 * MIB * FLOAT
    assert all(bool((t == i).all()) for i, t in enumerate(tensors))
    del tensors
    assert heap.held().live == 0
    assert torch.empty(2 * MIB).numel() and heap.held().peak == 2 * MIB * FLOAT


def test_what_does_not_fit_comes_from_torchs_own() -> None:
    run_ranks(_exhausted, 1)


def _no_range(rank: int, world: int) -> None:
    heap = find_heap()
    assert heap is not None
    with mock.patch("os.sysconf", lambda name: 1 << 31), pytest.raises(OSError) as failed:
        heap.install()
    assert failed.value.errno == errno.ENOMEM
    assert torch.ones(MIB).sum() == MIB and heap.install()


def test_a_system_that_gives_no_range() -> None:
    run_ranks(_no_range, 1)


def _trimmed(rank: int, world: int) -> None:
    heap = installed()
    before = resident()
    tensors = [torch.full((MIB + 5,), float(i)) for i in range(64)]
    full = resident()
    assert full - before > 60 * MIB * FLOAT
    del tensors[::2]
    assert resident() > full - 2 * MIB
    heap.trim()
    assert resident() < full - 31 * MIB * FLOAT
    held = heap.held()
    assert held.live <= held.kept <= held.live + 65 * PAGE
    assert all(bool((t == 2 * i + 1).all()) for i, t in enumerate(tensors))
    again = [torch.full((MIB + 5,), -1.0) for _ in range(32)]  # in the holes
    assert heap.held().kept <= 64 * (MIB + 5) * FLOAT + 65 * PAGE, (held, heap.held())
    assert all(bool((t == 2 * i + 1).all()) for i, t in enumerate(tensors)) and all(bool((t == -1).all()) for t in again)


def test_trim_returns_pages_and_keeps_contents() -> None:
    run_ranks(_trimmed, 1)


def _limited(rank: int, world: int) -> None:
    heap = installed()
    first = torch.ones(4 * MIB)
    used = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + 64 * MIB, hard))
    more = torch.ones(8 * MIB)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.ones(16 * MIB)
    assert heap.held().live == first.nbytes + more.nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    assert torch.ones(16 * MIB).sum() == 16 * MIB and heap.held().peak == first.nbytes + more.nbytes + 64 * MIB


def test_a_limit_of_the_process_data_holds() -> None:
    """Also one that is set later: the range is not data before it is used."""
    run_ranks(_limited, 1)


def _large_pages(rank: int, world: int) -> None:
    installed()
    held = torch.ones(16 * MIB)
    assert advised(held.data_ptr()) and advised(held.data_ptr() + held.nbytes - 1)


@needs_large_pages
def test_it_lies_on_large_pages() -> None:
    run_ranks(_large_pages, 1)


def _old_peak(rank: int, world: int) -> None:
    heap = installed()
    weights = torch.ones(4 * MIB)

    def step() -> int:
        step_takes = torch.ones(8 * MIB)
        del step_takes
        heap.step_ended()
        return heap.held().kept

    usual = 12 * MIB * FLOAT
    assert [step() for _ in range(40)] == [usual] * 40  # nothing is given back that the next step takes
    evaluation = torch.ones(64 * MIB)
    del evaluation
    kept = [step() for _ in range(40)]
    assert kept[:15] == [68 * MIB * FLOAT] * 15  # it might be one that comes after every few steps
    assert kept[17:] == [usual] * 23
    assert weights[-1] == 1
    small_peak = torch.ones(22 * MIB)  # beyond 1.5 times, but not 64 MiB beyond
    del small_peak
    assert [step() for _ in range(40)] == [26 * MIB * FLOAT] * 40


def test_a_peak_of_long_ago_is_given_back() -> None:
    run_ranks(_old_peak, 1)


def _holes_that_stay(rank: int, world: int) -> None:
    """A step that leaves holes each time, as large as all that it uses, does not take its pages anew each time."""
    heap = installed()
    kept = []
    for _ in range(64):
        first, after = torch.empty(50 * MIB), torch.empty(MIB)
        del first
        inside = torch.empty(MIB)
        second = torch.empty(50 * MIB)  # does not fit where the first was
        del after, inside, second
        heap.step_ended()
        kept.append(heap.held().kept)
    assert set(kept) == {0, 101 * MIB * FLOAT} and kept.count(0) == 4


def test_pages_go_back_once_in_16_steps() -> None:
    run_ranks(_holes_that_stay, 1)


def _other(rank: int, world: int, folder: str) -> None:
    """A copy of the library is another allocator."""
    path = library("heap").path
    assert path is not None
    heap, other = installed(), Heap(ctypes.CDLL(shutil.copy(path, f"{folder}/other.so")))
    assert not other.install()
    heap.uninstall()
    assert other.install() and not heap.install()
    tensor = torch.ones(MIB)
    assert heap.held().live == 0 and other.held().live == MIB * FLOAT
    heap.uninstall()  # takes away its own only
    assert torch.ones(MIB).sum() + tensor.sum() == 2 * MIB and other.held().peak == 2 * MIB * FLOAT


def test_another_allocator_stays(tmp_path: Path) -> None:
    run_ranks(_other, 1, str(tmp_path))


def test_a_build_belongs_to_one_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = torch_flags()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert torch_flags() != before
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert isinstance(torch_flags(), str) and "has no header" in torch_flags()
