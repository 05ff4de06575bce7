"""Large pages under the states of optimizers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn

from tests.ops.toolbox import advised, needs_large_pages
from zeroengine.ops import FusedAdam
from zeroengine.ops.pages import in_large_pages, large_page


@needs_large_pages
def test_moments_lie_on_large_pages() -> None:
    p = nn.Parameter(torch.ones(large_page()))  # four large pages
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], lr=0.5)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[p][name]
        assert advised(state.data_ptr() + state.nbytes // 2)


@needs_large_pages
@pytest.mark.parametrize("offset", [0, 4, 4096])
@pytest.mark.parametrize("pages", [0, 1, 3])
def test_only_whole_pages_inside_are_asked_for(offset: int, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Libc:
        def __init__(self, name: None) -> None:
            pass

        def madvise(self, address: Any, size: Any, advice: Any) -> int:
            asked.append((address.value, address.value + size.value))
            return -1

    size = large_page()
    memory = torch.empty((pages + 2) * size, dtype=torch.uint8)
    at = -memory.data_ptr() % size + offset
    t = memory[at : at + pages * size + 8]
    monkeypatch.setattr(ctypes, "CDLL", Libc)
    assert in_large_pages(t) is t
    whole = pages - (1 if offset else 0)
    assert sum(end - begin for begin, end in asked) == max(0, whole) * size
    assert all(t.data_ptr() <= begin and end <= t.data_ptr() + t.nbytes and begin % size == 0 for begin, end in asked)
