"""Large pages under the states of optimizers."""

from __future__ import annotations

import io
import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.ops.toolbox import advised, needs_large_pages
from zeroengine.ops import FusedAdam, pages
from zeroengine.ops.heap import find_heap
from zeroengine.ops.pages import large_page, zeros_like

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@needs_large_pages
@pytest.mark.parametrize("elements", [1 << 14, 1_000_000, 9_000_000])
def test_moments_lie_on_large_pages(elements: int) -> None:
    p = nn.Parameter(torch.ones(elements))
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], lr=0.5)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[p][name]
        end = state.nbytes if state.nbytes < 16 * MIB else state.nbytes // large_page() * large_page() - mmap.PAGESIZE
        assert all(advised(state.data_ptr() + at) for at in (0, end // 2, end - 1))


@pytest.mark.parametrize("elements", [1 << 14, 1 << 20, 9_000_000])
@pytest.mark.parametrize("heap", [False, True])
def test_what_is_updated_together_lies_apart_in_the_cache(elements: int, heap: bool) -> None:
    serves = find_heap() if heap else None
    if heap and (serves is None or not serves.install()):
        pytest.skip("no native heap")
    try:
        params = [nn.Parameter(torch.ones(elements)) for _ in range(6)]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = FusedAdam(params, lr=0.5, amsgrad=True)
        optimizer.step()
        for p in params:
            states = [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
            assert p.grad is not None and all(s.is_contiguous() and s.data_ptr() % 64 == 0 for s in states)
            for i, s in enumerate(states):
                for other in (p, p.grad, *states[:i]):
                    assert 256 <= (s.data_ptr() - other.data_ptr()) % 4096 <= 4096 - 256
    finally:
        if serves is not None:
            serves.uninstall()


@needs_large_pages
def test_they_take_no_more_memory_than_small_pages() -> None:
    like = torch.empty(20 * MIB // 4 + 5)
    before = resident()
    made = [zeros_like(like, torch.float32).fill_(1.0) for _ in range(4)]
    assert resident() - before < sum(t.nbytes for t in made) + 64 * mmap.PAGESIZE


@needs_large_pages
@pytest.mark.parametrize("mib", [1, 4, 16])
def test_sizes_that_are_powers_of_two_fill_the_large_pages(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_chunk", None)  # one that is begun is filled up with others
    p = torch.empty(mib * MIB // 4)
    before = resident()
    made = [zeros_like(p, torch.float32, beside=(p,)).fill_(1.0) for _ in range(64 // mib)]
    assert resident() - before < sum(t.nbytes for t in made) * 1.02 + large_page()


@pytest.mark.parametrize("shape", [(), (0,), (70_000,), (300, 257), (5, 100, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_zeros_of_the_same_layout(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for like in (torch.ones(shape, dtype=torch.bfloat16), torch.ones(shape).mT if len(shape) > 1 else torch.ones(shape)):
        made, wanted = zeros_like(like, dtype), torch.zeros_like(like, dtype=dtype)
        assert made.dtype is dtype and made.shape == like.shape and made.stride() == wanted.stride()
        assert torch.equal(made, wanted) and not made.requires_grad and not made._is_view()
        assert made.data_ptr() % 64 == 0


def test_each_has_a_storage_of_its_own() -> None:
    like = torch.ones(50_001)
    made = [zeros_like(like, torch.float32) for _ in range(9)]
    for i, t in enumerate(made):
        t.fill_(i)
    assert all(bool((t == i).all()) for i, t in enumerate(made))
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in made)
    file = io.BytesIO()
    torch.save(made[3], file)
    assert file.tell() < 2 * like.nbytes
    assert torch.equal(torch.load(io.BytesIO(file.getvalue())), made[3])


@needs_large_pages
@pytest.mark.parametrize("mib", [3, 20])
def test_what_is_freed_goes_back_at_once(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_chunk", None)  # of another test, some of which would be there already
    like = torch.empty(mib * MIB // 4)
    before = resident()
    made: list[Tensor | None] = [zeros_like(like, torch.float32).fill_(1.0) for _ in range(8)]
    assert resident() - before >= 8 * mib * MIB
    kept = resident()
    for i in range(0, 8, 2):
        made[i] = None  # between others that stay
    assert kept - resident() >= 4 * mib * MIB - 64 * mmap.PAGESIZE
    assert all(t.min() == t.max() == 1.0 for t in made if t is not None)
    made.clear()
    assert resident() - before < large_page() + 64 * mmap.PAGESIZE


def test_where_the_system_refuses_torch_gives_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    made = zeros_like(torch.ones(9_000_000), torch.float32)
    assert made.shape == (9_000_000,) and not made.any()
