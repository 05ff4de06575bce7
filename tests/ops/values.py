"""Tensors that are awkward: odd sizes, unaligned views, denormals, infinities, NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from zeroengine.ops import rules
from zeroengine.ops.native import Segment
from zeroengine.ops.rules import HYPERS, Rule

RULES = [value for value in vars(rules).values() if isinstance(value, Rule)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([127, 511, 1023, 1024, 1025, 2049, 5000]))
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 6e-8, 3e38, 65504.0, 65519.9, 65520.0, 1e-30)


def awkward(n: int, dtype: torch.dtype, seed: int, special: bool, offset: int = 0) -> Tensor:
    """`n` values of many magnitudes, `offset` elements behind an aligned address."""
    random = torch.Generator().manual_seed(seed)
    held = torch.empty(n + offset, dtype=dtype)
    values = torch.randn(n, generator=random) * 10.0 ** torch.randint(-6, 3, (n,), generator=random)
    if special and n:
        some = torch.randint(0, n, (min(n, 16),), generator=random)
        picks = torch.randint(0, len(SPECIAL), (len(some),), generator=random)
        values[some] = torch.tensor(SPECIAL)[picks]
    held[offset:] = values.to(dtype)
    return held[offset:]


def segment(
    rule: Rule, n: int, kinds: Sequence[torch.dtype | None], hypers: Sequence[float], seed: int, special: bool, offset: int
) -> Segment:
    """`kinds`: of parameter, gradient and copy. Second moments are not negative."""
    param, grad, copy = kinds
    states = [awkward(n, torch.float32, seed + 2 + k, special, offset) for k in range(rule.states)]
    if rule.name.startswith("ada"):
        states = [s.abs() if k or rule.states == 1 else s for k, s in enumerate(states)]
    row = (*hypers, *(0.0,) * (HYPERS - len(hypers)))
    to = None if copy is None else awkward(n, copy, seed + 9, False, offset)
    assert param is not None and grad is not None
    return awkward(n, param, seed, special, offset), awkward(n, grad, seed + 1, special, offset), states, to, row


def parts(one: Segment) -> list[Tensor]:
    param, grad, states, copy, _ = one
    return [param, grad, *states, *([] if copy is None else [copy])]


def cloned(one: Segment) -> Segment:
    param, grad, states, copy, hypers = one
    return param.clone(), grad.clone(), [s.clone() for s in states], None if copy is None else copy.clone(), hypers


def bits(t: Tensor) -> Tensor:
    """The bits of `t`, with one pattern for every NaN."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return torch.where(t.isnan(), torch.full_like(t, math.nan), t).view(whole)


def assert_same_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    assert a.dtype is b.dtype and a.shape == b.shape
    different = (bits(a.detach().reshape(-1)) != bits(b.detach().reshape(-1))).nonzero().flatten().tolist()
    if different:
        i = different[0]
        at = f"{len(different)} of {a.numel()} elements differ, the first at {i}"
        raise AssertionError(f"{what}: {at}: {a.reshape(-1)[i].item()!r} and {b.reshape(-1)[i].item()!r}")
