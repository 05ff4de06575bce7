"""Native operations against their twins, bit for bit; and against where a buffer is cut, threads, and the compiler's target."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.toolbox import REAL
from tests.ops.values import DTYPES, RULES, SIZES, assert_same_bits, awkward, cloned, parts, segment
from zeroengine.ops import flat, native, twins
from zeroengine.ops.build import library
from zeroengine.ops.compile import compile_library
from zeroengine.ops.rules import ADAMW, Rule
from zeroengine.ops.sources import Sources, csrc
from zeroengine.ops.toolchain import Compiler, Target, cxx_flags

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.lists(st.floats(-2, 2, width=32) | st.sampled_from([0.0, 0.1, 0.999, 1e-3, 1e-8, 1.0]), min_size=7, max_size=7)
SCALES = st.sampled_from([1.0, 0.5, 1 / 3, 1 / 65536, 0.0])


@pytest.fixture(scope="module")
def dll() -> ctypes.CDLL:
    found = library("update")
    if found.dll is None:
        pytest.skip(f"no native library: {found.reason}")  # test_build.py fails where there is a compiler
    return found.dll


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@FEW
@given(data=st.data())
def test_an_update_equals_its_twin(dll: ctypes.CDLL, rule: Rule, data: st.DataObject) -> None:
    segments = []
    for _ in range(data.draw(st.integers(1, 3))):
        kinds = [data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))]
        copy = data.draw(st.sampled_from((None, *DTYPES)))
        n, seed, offset = data.draw(SIZES), data.draw(st.integers(0, 10**6)), data.draw(st.integers(0, 3))
        hypers = data.draw(NUMBERS)
        segments.append(segment(rule, n, [*kinds, copy], hypers, seed, data.draw(st.booleans()), offset))
    scale = data.draw(SCALES)
    other = [cloned(s) for s in segments]
    native.update(dll, rule, segments, scale)
    for one in other:
        flat._update_by_twin(rule, one, scale)
    for i, (a, b) in enumerate(zip(segments, other, strict=True)):
        for k, (x, y) in enumerate(zip(parts(a), parts(b), strict=True)):
            assert_same_bits(x, y, f"{rule.name}, segment {i}, tensor {k}")


def test_numbers_that_differ_in_the_sign_of_zero_alone_are_not_mixed_up(dll: ctypes.CDLL) -> None:
    (nesterov,) = [r for r in RULES if r.name == "sgd with Nesterov momentum"]
    kinds = [torch.float32, torch.float32, None]
    numbers = [[0.0, 0.0, zero, 0.1, 0.0, 0.1, 0.0] for zero in (0.0, -0.0)]
    segments = [segment(nesterov, 127, kinds, hypers, 0, True, 0) for hypers in numbers]
    other = [cloned(s) for s in segments]
    native.update(dll, nesterov, segments, 1.0)
    for one, two in zip(segments, other, strict=True):
        flat._update_by_twin(nesterov, two, 1.0)
        for x, y in zip(parts(one), parts(two), strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@FEW
@given(n=SIZES, cuts=st.lists(st.floats(0, 1), max_size=4), seed=st.integers(0, 10**6), threads=st.integers(1, 2))
def test_cuts_do_not_show(dll: ctypes.CDLL, rule: Rule, n: int, cuts: list[float], seed: int, threads: int) -> None:
    whole = segment(rule, n, [torch.float32, torch.float32, torch.bfloat16], [0.1, 0.9, 0.1, 1e-2, 1.0, 1e-8, 0.1], seed, True, 0)
    other = cloned(whole)
    native.update(dll, rule, [whole], 0.5)
    at = sorted({0, n, *(round(c * n) for c in cuts)})
    param, grad, states, copy, hypers = other
    assert copy is not None
    pieces = [(param[a:b], grad[a:b], [s[a:b] for s in states], copy[a:b], hypers) for a, b in zip(at, at[1:], strict=False)]
    if pieces:
        native.update(dll, rule, pieces, 0.5)
    for x, y in zip(parts(whole), parts(other), strict=True):
        assert_same_bits(x, y)


def test_threads_do_not_show(dll: ctypes.CDLL) -> None:
    n = 300_001
    one = segment(ADAMW, n, [torch.float32, torch.bfloat16, torch.float16], [0.1, 0.9, 0.1, 1e-2, 1.0, 1e-8, 0.1], 1, True, 1)
    other, before = cloned(one), torch.get_num_threads()
    results = []
    try:
        for threads, s in ((1, one), (3, other)):
            torch.set_num_threads(threads)
            native.update(dll, ADAMW, [s, cloned(one)], 0.5)
            results.append(native.squares(dll, [s[1], s[2][0]]))
    finally:
        torch.set_num_threads(before)
    for x, y in zip(parts(one), parts(other), strict=True):
        assert_same_bits(x, y)
    assert torch.equal(results[0][0].view(torch.int64), results[1][0].view(torch.int64))
    assert torch.equal(results[0][1], results[1][1])


@FEW
@given(
    n=SIZES,
    kinds=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    scale=SCALES,
    seed=st.integers(0, 10**6),
    offset=st.integers(0, 3),
)
def test_a_cast_equals_its_twin(
    dll: ctypes.CDLL, n: int, kinds: tuple[torch.dtype, torch.dtype], scale: float, seed: int, offset: int
) -> None:
    source = awkward(n, kinds[0], seed, True, offset)
    got, wanted = torch.empty(n, dtype=kinds[1]), torch.empty(n, dtype=kinds[1])
    native.cast(dll, [got], [source], scale)
    twins.cast(wanted, source, scale)
    assert_same_bits(got, wanted, f"{kinds[0]} to {kinds[1]}")


def test_every_16_bit_number_and_every_rounding(dll: ctypes.CDLL) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        exact = every.view(dtype)
        up = torch.empty(2**16)
        native.cast(dll, [up], [exact], 1.0)
        assert_same_bits(up, exact.float(), f"{dtype} to fp32")
        finite = exact.float()[exact.isfinite()]
        above = torch.nextafter(finite, torch.tensor(math.inf))
        between = (finite + torch.nextafter(exact[exact.isfinite()], torch.tensor(math.inf, dtype=dtype)).float()) / 2
        ties = torch.cat([finite, above, between, torch.nextafter(between, torch.tensor(-math.inf))])
        down = torch.empty(ties.numel(), dtype=dtype)
        native.cast(dll, [down], [ties], 1.0)
        assert_same_bits(down, ties.to(dtype), f"fp32 to {dtype}")


@FEW
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    special=st.booleans(),
)
def test_squares_equal_their_twin(dll: ctypes.CDLL, sizes: list[int], dtype: torch.dtype, seed: int, special: bool) -> None:
    sources = [awkward(n, dtype, seed + i, special, i) for i, n in enumerate(sizes)]
    sums, bad = native.squares(dll, sources)
    for i, source in enumerate(sources):
        wanted, count = twins.squares(source)
        assert_same_bits(sums[i], wanted, f"sum {i} of {sizes[i]}")
        assert bad[i] == count == (~source.isfinite()).sum()
        if not count and source.numel():
            assert math.isclose(float(sums[i]), float(source.double().square().sum()), rel_tol=1e-12)


def test_without_the_vector_units_of_this_machine(dll: ctypes.CDLL, tmp_path: Path) -> None:
    """The plain C++ of conversions, and another vector width: the bits of -march=native."""
    folder = csrc()
    assert folder is not None
    path = tmp_path / "plain.so"
    compile_library(Sources(folder, "update"), Compiler((REAL,), ""), cxx_flags(Target(())), path)
    plain = ctypes.CDLL(str(path))
    hypers = [0.1, 0.9, 0.1, 1e-2, 1.0, 1e-8, 0.1]
    for rule in RULES:
        for dtype in DTYPES:
            one = segment(rule, 3001, [dtype, dtype, dtype], hypers, 5, True, 1)
            other = cloned(one)
            native.update(dll, rule, [one], 0.5)
            native.update(plain, rule, [other], 0.5)
            for x, y in zip(parts(one), parts(other), strict=True):
                assert_same_bits(x, y, f"{rule.name} {dtype}")
    every = torch.arange(0, 2**32, 65521, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        down = torch.empty(every.numel(), dtype=dtype)
        native.cast(plain, [down], [every], 1.0)
        assert_same_bits(down, every.to(dtype), f"fp32 to {dtype}")
        up = torch.empty(every.numel())
        native.cast(plain, [up], [down], 1.0)
        assert_same_bits(up, down.float(), f"{dtype} to fp32")


def test_what_the_native_one_does_not_take_goes_to_the_twin(dll: ctypes.CDLL) -> None:
    hypers = (0.1, 0.9, 0.1, 1e-2, 1.0, 1e-8, 0.1, 0.0)

    def made(strided: bool) -> native.Segment:
        values = [torch.arange(12.0).view(3, 4) + k for k in range(4)]
        p, g, m, v = (t.t().contiguous().t() if strided else t for t in values)
        return p, g, [m, v], None, hypers

    strided, plain = made(True), made(False)
    versions = plain[0]._version
    flat.update(ADAMW, [strided, plain])
    for x, y in zip(parts(strided), parts(plain), strict=True):
        assert_same_bits(x, y)
    assert plain[0]._version > versions, "autograd does not see the native write"


@pytest.mark.parametrize("wrong", [0, 1, 2, 3], ids=["gradient", "moment", "dtype of a moment", "copy"])
def test_a_segment_of_other_sizes_never_reaches_the_native_loop(wrong: int) -> None:
    hypers = (0.1, 0.9, 0.1, 1e-2, 1.0, 1e-8, 0.1, 0.0)
    sizes = [9] * 4
    sizes[wrong] = 5 if wrong != 2 else 9
    kind = torch.bfloat16 if wrong == 2 else torch.float32
    states = [torch.zeros(sizes[1]), torch.zeros(9, dtype=kind)]
    one = (torch.ones(9), torch.ones(sizes[0]), states, torch.zeros(sizes[3]), hypers)
    if wrong == 2:
        flat.update(ADAMW, [one])
        assert bool(states[1].isfinite().all()) and one[0][8] != 1
    else:
        with pytest.raises(RuntimeError, match="size"):
            flat.update(ADAMW, [one])


def test_long_segments_of_the_twin_are_taken_in_pieces() -> None:
    kinds = [torch.float32, torch.float32, torch.bfloat16]
    one = segment(ADAMW, 70_001, kinds, [0.1, 0.9, 0.1, 1e-2, 1.0, 1e-8, 0.1], 3, True, 0)
    other = cloned(one)
    flat._update_by_twin(ADAMW, one, 0.5)
    param, grad, states, copy, hypers = other
    ADAMW.twin(param, grad * 0.5, states, hypers)
    assert copy is not None
    copy.copy_(param)
    for x, y in zip(parts(one), parts(other), strict=True):
        assert_same_bits(x, y)


def test_sizes_and_devices_are_checked() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        flat.cast([torch.zeros(2)], [torch.zeros(3)])
    assert [t.tolist() for t in flat.squares([])] == [[], []]
    assert [t.tolist() for t in flat.squares([torch.empty(0), torch.tensor([3.0, math.inf])])] == [[0.0, math.inf], [0, 1]]
