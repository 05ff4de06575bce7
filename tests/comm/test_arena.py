"""The memory that a process shares: blocks, their reuse, and what is left of them."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch

from zeroengine.comm.arena import Arena
from zeroengine.comm.shm_native import Native, native

MIB = 1 << 20


@pytest.fixture
def library() -> Native:
    found = native()
    assert isinstance(found, Native), found
    return found


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:zeroengine")


def pages(arena: Arena) -> int:
    """Bytes of the file that exist."""
    return os.fstat(arena.fd).st_blocks * 512


def test_tensors_are_ordinary(library: Native) -> None:
    arena = Arena(library, 1 << 40)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
        t = arena.tensor(1001, dtype)
        assert t.shape == (1001,) and t.dtype == dtype and t.is_contiguous() and not t.is_inference()
        t.fill_(1)
        assert arena.base <= t.data_ptr() < arena.base + arena.size
        assert bool((t == 1).all())
    with torch.inference_mode():
        t = arena.tensor(10, torch.float32)
    t.requires_grad_()
    (t * 2).sum().backward()
    assert t.grad is not None
    arena.close()


def test_a_block_is_reused_when_its_last_view_is_gone(library: Native) -> None:
    arena = Arena(library, 1 << 40)
    first = arena.tensor(MIB, torch.float32)
    place, view = first.data_ptr(), first[5:9]
    del first
    gc.collect()
    second = arena.tensor(MIB, torch.float32)
    assert second.data_ptr() != place  # the view is alive
    del view
    assert arena.tensor(MIB, torch.float32).data_ptr() == place
    arena.close()


def test_free_blocks_beyond_the_bound_give_their_pages_back(library: Native) -> None:
    arena = Arena(library, 1 << 40)
    many = [arena.tensor(6 * MIB, torch.uint8).fill_(1) for _ in range(4)]
    assert pages(arena) == arena.bytes() == 24 * MIB
    many.clear()
    assert pages(arena) == arena.bytes() == 12 * MIB  # 16 MiB at most
    big = arena.tensor(3 * MIB, torch.float32)  # of the joined space
    assert float(big[-1]) == 0.0
    arena.close()


def test_large_blocks_begin_with_a_large_page(library: Native) -> None:
    arena = Arena(library, 1 << 40)
    assert arena.base % (2 * MIB) == 0
    held = []
    for nbytes in (100_000, 5 * MIB + 1, 70_000, 2 * MIB, 9 * MIB):
        t = arena.tensor(nbytes, torch.uint8).fill_(7)
        assert arena.base <= t.data_ptr() and t.data_ptr() + nbytes <= arena.base + arena.size
        if nbytes >= 2 * MIB:
            assert t.data_ptr() % (2 * MIB) == 0
        assert all(t.data_ptr() >= o.data_ptr() + o.numel() or o.data_ptr() >= t.data_ptr() + nbytes for o in held)
        held.append(t)
    assert all(bool((t == 7).all()) for t in held) and pages(arena) <= arena.bytes()
    del held[1], t
    again = arena.tensor(5 * MIB + 1, torch.uint8)
    assert all(bool((t == 7).all()) for t in held) and again.data_ptr() % (2 * MIB) == 0
    arena.close()


def test_large_pages(library: Native) -> None:
    """Only whole ones of the range, zeros where nothing was written; a refusal is an answer."""
    arena = Arena(library, 1 << 40)
    at = arena.reserve(8 * MIB)
    assert at is not None and at % (2 * MIB) == 0 and pages(arena) == 0
    assert library.large_pages(arena.base + at + 4096, 2 * MIB) == 0 and pages(arena) == 0  # holds no whole one
    answer = library.large_pages(arena.base + at + 4096, 6 * MIB)
    if answer != 0:
        arena.close()
        pytest.skip(f"this system gives none: {os.strerror(answer)}")
    assert pages(arena) == 4 * MIB
    mapped = (ctypes.c_char * (8 * MIB)).from_address(arena.base + at)
    assert mapped.raw == bytes(8 * MIB)
    sizes = [line for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith(("ShmemPmd", "FilePmd"))]
    assert sum(int(line.split()[1]) for line in sizes) >= 4096
    arena.close()


def test_closing_waits_for_the_last_tensor(library: Native) -> None:
    before, fds = maps(), len(os.listdir("/proc/self/fd"))
    arena = Arena(library, 1 << 40)
    t = arena.tensor(1000, torch.float32).fill_(3.0)
    arena.close()
    arena.close()
    assert maps() == before + 1 and float(t.sum()) == 3000.0
    with pytest.raises(RuntimeError, match="closed"):
        arena.tensor(10, torch.float32)
    del t
    assert maps() == before and len(os.listdir("/proc/self/fd")) == fds


def test_a_full_arena_gives_ordinary_memory(library: Native) -> None:
    arena = Arena(library, 1 << 30)
    t = arena.tensor(arena.size // 4 + 1, torch.float32)
    assert not arena.base <= t.data_ptr() < arena.base + arena.size
    arena.close()


def test_a_forked_child_frees_nothing_of_its_parents(library: Native) -> None:
    arena = Arena(library, 1 << 40)
    tensors = [arena.tensor(8 * MIB, torch.float32).fill_(5.0) for _ in range(4)]
    child = os.fork()
    if child == 0:
        tensors.clear()
        gc.collect()
        place = arena.tensor(MIB, torch.float32).data_ptr()
        os._exit(int(arena.base <= place < arena.base + arena.size))
    assert os.waitpid(child, 0)[1] == 0
    assert all(float(t[0]) == 5.0 for t in tensors) and pages(arena) == 128 * MIB
    arena.close()
