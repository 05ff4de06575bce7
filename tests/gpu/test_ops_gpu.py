"""CUDA kernels of the optimizers and casts: the bits of the twin on the CPU. Needs one CUDA device and nvcc."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ops.values import DTYPES, RULES, assert_same_bits, awkward, cloned, parts, segment
from zeroengine.ops import FusedAdam, choose, flat, twins
from zeroengine.ops.native import Segment
from zeroengine.ops.rules import Rule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HYPERS = [0.1, 0.9, 0.1, 1e-2, 1.0, 1e-8, 0.1]
SIZES = (1, 7, 8, 4095, 4096, 4097, 100_003)


def on_gpu(one: Segment) -> Segment:
    param, grad, states, copy, hypers = one
    move = torch.Tensor.cuda
    return move(param), move(grad), [move(s) for s in states], None if copy is None else move(copy), hypers


def test_the_native_library_is_built() -> None:
    for name in ("update", "cast"):
        choice = choose(name, torch.device("cuda", 0))
        assert choice.implementation == "native", choice.reason


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_update_has_the_bits_of_the_cpus_twin(rule: Rule, dtype: torch.dtype) -> None:
    kinds = [torch.float32, dtype, dtype]
    rows = [segment(rule, SIZES[i % len(SIZES)], kinds, HYPERS, i, True, 0) for i in range(40)]  # two launches
    device = [on_gpu(cloned(one)) for one in rows]
    flat.update(rule, device, 1 / 3)
    for one in rows:
        flat._update_by_twin(rule, one, 1 / 3)
    for i, (a, b) in enumerate(zip(device, rows, strict=True)):
        for x, y in zip(parts(a), parts(b), strict=True):
            assert_same_bits(x.cpu(), y, f"{rule.name}, segment {i}")


def test_unaligned_views_and_a_factor_on_the_device() -> None:
    rule = RULES[1]
    whole = on_gpu(segment(rule, 5000, [torch.float32] * 3, HYPERS, 1, True, 0))
    other = on_gpu(cloned((*[t.cpu() for t in whole[:2]], [s.cpu() for s in whole[2]], whole[3].cpu(), whole[4])))  # type: ignore[union-attr]
    factor = torch.tensor(0.25, device="cuda")
    flat.update(rule, [whole], factor)
    param, grad, states, copy, hypers = other
    assert copy is not None
    for a, b in ((0, 1), (1, 1001), (1001, 5000)):
        flat.update(rule, [(param[a:b], grad[a:b], [s[a:b] for s in states], copy[a:b], hypers)], 0.25)
    for x, y in zip(parts(whole), parts(other), strict=True):
        assert_same_bits(x.cpu(), y.cpu())


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    sources = [awkward(n, source, n, True, offset) for n in SIZES for offset in (0, 1)]
    got = [torch.empty(s.numel(), dtype=target, device="cuda") for s in sources]
    flat.cast(got, [s.cuda() for s in sources], 0.5)
    for s, g in zip(sources, got, strict=True):
        wanted = torch.empty(s.numel(), dtype=target)
        twins.cast(wanted, s, 0.5)
        assert_same_bits(g.cpu(), wanted)


def test_squares_are_those_of_the_cpu() -> None:
    sources = [awkward(n, torch.float32, n, False) for n in SIZES]
    sums, bad = flat.squares([s.cuda() for s in sources])
    wanted, none = flat.squares(sources)
    assert_same_bits(sums.cpu(), wanted)
    assert torch.equal(bad.cpu(), none)


def test_the_current_stream_is_used_and_steps_equal_the_cpu() -> None:
    def run(device: str) -> Tensor:
        p = nn.Parameter(torch.linspace(-1, 1, 10_007).to(device))
        optimizer = FusedAdam([p], lr=0.1, weight_decay=0.1)
        for step in range(5):
            p.grad = torch.full_like(p, 0.1 * (step + 1))
            optimizer.step(grad_scale=0.5)
        return p.detach().cpu()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        on_side = run("cuda")
    assert_same_bits(on_side, run("cpu"))
