"""Contiguous ranges of row-major tensors as axis-aligned rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Rectangle = tuple[tuple[int, ...], tuple[int, ...], int]
"""(offsets, sizes, start_in_range): the box at `offsets` of extent `sizes` holds, in row-major order, the elements
[start_in_range, start_in_range + prod(sizes)) of the range."""


def rectangles(shape: Sequence[int], start: int, end: int) -> list[Rectangle]:
    """Cuts elements [start, end) of a flattened row-major tensor of `shape` into boxes, in the order of the elements.

    A tensor of N dimensions gives at most max(1, 2N - 1) boxes: on each axis but the last, a partial row before and one
    after the run of whole rows. A tensor without dimensions has one element and one box; an empty range has no box.

    Raises ValueError if the range does not lie inside the tensor.
    """
    dims = tuple(int(n) for n in shape)
    numel = math.prod(dims)
    if not 0 <= start <= end <= numel:
        raise ValueError(f"elements [{start}, {end}) do not lie in a tensor of shape {dims} with {numel} elements")
    found: list[Rectangle] = []
    at = 0
    for offsets, sizes in _cut(dims, start, end):
        found.append((offsets, sizes, at))
        at += math.prod(sizes)
    return found


def _cut(dims: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start == end:
        return
    if not dims:
        yield (), ()
        return
    row = math.prod(dims[1:])
    first, last = start // row, (end - 1) // row
    if first == last:
        yield from _in_row(first, dims[1:], start - first * row, end - first * row)
        return
    if start % row:
        yield from _in_row(first, dims[1:], start % row, row)
        first += 1
    whole_end = end // row
    if first < whole_end:
        yield (first, *(0 for _ in dims[1:])), (whole_end - first, *dims[1:])
    if end % row:
        yield from _in_row(last, dims[1:], 0, end % row)


def _in_row(index: int, dims: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _cut(dims, start, end):
        yield (index, *offsets), (1, *sizes)
