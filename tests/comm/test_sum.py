"""The native sum over ranks against its twin in torch, bit for bit: sizes, types, places, numbers of ranks, special values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.values import assert_same_bits, awkward
from zeroengine.comm.fixed_order import reduce_rows, wide_rows
from zeroengine.comm.shm_native import TYPES, Native, integers, native

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
PAIRS = [(t, t) for t in FLOATS + INTEGERS] + [
    (torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float16, torch.float32), (torch.float16, torch.float64),
]  # fmt: skip


@pytest.fixture(scope="module")
def shm() -> Native:
    found = native()
    if isinstance(found, str):
        pytest.skip(f"no native library: {found}")  # test_build.py fails where there is a compiler
    return found


def made(n: int, dtype: torch.dtype, seed: int, offset: int) -> Tensor:
    if dtype in FLOATS:
        return awkward(n, dtype, seed, True, offset)
    g = torch.Generator().manual_seed(seed)
    edge = torch.iinfo(dtype)
    return torch.randint(edge.min, edge.max, (n + offset,), generator=g, dtype=dtype)[offset:]


def same(got: Tensor, want: Tensor, what: str) -> None:
    if got.is_floating_point():
        assert_same_bits(got, want, what)
    else:
        assert torch.equal(got, want), what


def twin(rows: list[Tensor], out: Tensor, scale: float, accumulate: bool) -> None:
    stacked = torch.stack(rows)
    if stacked.dtype != out.dtype:
        stacked = wide_rows(stacked, out.dtype, torch.empty((len(rows) + 1) // 2 * out.numel(), dtype=out.dtype))
    reduce_rows(stacked, "sum", out, scale=scale, accumulate=accumulate)


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.sampled_from(PAIRS),
    ranks=st.integers(2, 9),
    n=st.one_of(st.integers(0, 70), st.sampled_from([511, 512, 513, 1500, 4097])),
    seed=st.integers(0, 10**6),
    offsets=st.lists(st.integers(0, 5), min_size=10, max_size=10),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 1e-6, 0.0]),
    accumulate=st.booleans(),
    inside=st.booleans(),
)
def test_a_sum_equals_its_twin(
    shm: Native,
    kinds: tuple[torch.dtype, torch.dtype],
    ranks: int,
    n: int,
    seed: int,
    offsets: list[int],
    scale: float,
    accumulate: bool,
    inside: bool,
) -> None:
    wire, dtype = kinds
    scale = scale if dtype in FLOATS else 1.0
    rows = [made(n, wire, seed + r, offsets[r]) for r in range(ranks)]
    out = rows[seed % ranks] if inside and wire == dtype and not accumulate else made(n, dtype, seed + 99, offsets[9])
    want = out.clone()
    twin([r.clone() for r in rows], want, scale, accumulate)
    before = [r.clone() for r in rows]
    addresses = integers([r.data_ptr() for r in rows])
    shm.sum(out.data_ptr(), addresses, ranks, n, TYPES[wire], TYPES[dtype], scale, int(accumulate))
    same(out, want, f"{ranks} rows of {wire} in {dtype}")
    for row, old in zip(rows, before, strict=True):
        if row is not out:
            same(row, old, "a row that was read")


def test_long_sums_past_the_caches(shm: Native) -> None:
    """Long ones are stored by other instructions, from the first aligned place on."""
    for wire, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        n = (4 << 20) // dtype.itemsize + 777
        rows = [made(n, wire, r, r % 3) for r in range(3)]
        out, want = made(n, dtype, 9, 1), torch.empty(n, dtype=dtype)
        twin(rows, want, 0.3, False)
        shm.sum(out.data_ptr(), integers([r.data_ptr() for r in rows]), 3, n, TYPES[wire], TYPES[dtype], 0.3, 0)
        assert_same_bits(out, want, f"{wire} in {dtype}")


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("start", [0, 1, 13])
def test_long_sums_of_fp32(shm: Native, ranks: int, start: int) -> None:
    """The loops for two to four rows, of which each has a head, whole lines and a tail; five rows take the other way."""
    n = (4 << 20) // 4 + 777
    rows = [made(n, torch.float32, r, (r + start) % 5) for r in range(ranks)]
    addresses = integers([r.data_ptr() for r in rows])
    for scale, accumulate in ((1.0, False), (1 / 3, False), (1.0, True), (1 / 3, True)):
        out = made(n, torch.float32, 9, start)
        want = out.clone()
        twin([r.clone() for r in rows], want, scale, accumulate)
        shm.sum(out.data_ptr(), addresses, ranks, n, TYPES[torch.float32], TYPES[torch.float32], scale, int(accumulate))
        assert_same_bits(out, want, f"{ranks} rows, scale {scale}, accumulate {accumulate}")
    place = rows[ranks - 1]
    want = torch.empty(n)
    twin([r.clone() for r in rows], want, 0.3, False)
    shm.sum(place.data_ptr(), addresses, ranks, n, TYPES[torch.float32], TYPES[torch.float32], 0.3, 0)
    assert_same_bits(place, want, f"{ranks} rows, in place of the last")
