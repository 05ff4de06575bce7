"""The cut of contiguous ranges into rectangles, against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroengine.checkpoint import rectangles


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(_ranges())
@settings(max_examples=500, deadline=None)
def test_boxes_hold_the_range_once_and_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = case
    whole = torch.arange(math.prod(shape)).view(shape)
    found = rectangles(shape, start, end)
    values: list[int] = []
    for offsets, sizes, at in found:
        assert at == len(values)
        assert len(offsets) == len(sizes) == len(shape) and all(n > 0 for n in sizes)
        values += whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].reshape(-1).tolist()
    assert values == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(_ranges())
@settings(max_examples=200, deadline=None)
def test_dimensions_of_size_one_add_no_box(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = case
    padded = tuple(n for size in shape for n in (1, size))
    assert len(rectangles(padded, start, end)) == len(rectangles(shape, start, end))


def test_known_cuts() -> None:
    assert rectangles((), 0, 1) == [((), (), 0)]
    assert rectangles((), 0, 0) == []
    assert rectangles((0, 3), 0, 0) == []
    assert rectangles((7,), 2, 5) == [((2,), (3,), 0)]
    assert rectangles((3, 5), 0, 15) == [((0, 0), (3, 5), 0)]
    assert rectangles((3, 5), 3, 12) == [((0, 3), (1, 2), 0), ((1, 0), (1, 5), 2), ((2, 0), (1, 2), 7)]
    assert len(rectangles((4, 4, 4, 4), 1, 255)) == 7


@pytest.mark.parametrize(("shape", "start", "end"), [((3, 5), -1, 2), ((3, 5), 4, 2), ((3, 5), 0, 16), ((), 0, 2)])
def test_a_range_outside_the_tensor_is_an_error(shape: tuple[int, ...], start: int, end: int) -> None:
    with pytest.raises(ValueError, match="do not lie in a tensor of shape"):
        rectangles(shape, start, end)
