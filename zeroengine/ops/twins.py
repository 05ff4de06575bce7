"""The operations in plain torch, on any device: what runs where there is no native library, and what the native ones must equal
to the last bit. Each line rounds once, in the order of csrc/ze/rules.h; a fused form of torch (add with alpha, addcmul) may
contract or not by the place in memory, so none is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Hypers = Sequence[float]
ElementRule = Callable[[Tensor, Tensor, Sequence[Tensor], Hypers], None]
"""(parameter, scaled gradient, states, hypers), all of one dtype; updates parameter and states in place."""

_BLOCK = 1024  # kBlock of csrc/ze/parallel.h


def adam(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    _adam(p, g + p * h[6], states, h)


def adamw(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    p.mul_(h[6])
    _adam(p, g, states, h)


def _adam(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    m, v = states[0], states[1]
    m.add_((g - m).mul_(h[0]))
    v.mul_(h[1]).add_((g * g).mul_(h[2]))
    if len(states) == 3:
        top = states[2]
        top.copy_(torch.where((v > top) | (v != v), v, top))  # `maximum` chooses either zero of 0.0 and -0.0
        v = top
    p.sub_((m / _sqrt(v).mul_(h[4]).add_(h[5])).mul_(h[3]))


def lion(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    m = states[0]
    c = m + (g - m).mul_(h[0])
    sign = torch.where(c > 0, 1.0, torch.where(c < 0, -1.0, c))  # of NaN: NaN
    p.mul_(h[3]).sub_(sign.mul_(h[2]))
    m.add_((g - m).mul_(h[1]))


def adagrad(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    g = g + p * h[2]
    states[0].add_(g * g)
    p.sub_((g / _sqrt(states[0]).add_(h[1])).mul_(h[0]))


def sgd(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    p.sub_((g + p * h[1]).mul_(h[0]))


def sgd_momentum(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    g = g + p * h[1]
    states[0].mul_(h[2]).add_(g * h[3])
    p.sub_(states[0] * h[0])


def sgd_nesterov(p: Tensor, g: Tensor, states: Sequence[Tensor], h: Hypers) -> None:
    g = g + p * h[1]
    states[0].mul_(h[2]).add_(g * h[3])
    p.sub_((g + states[0] * h[4]).mul_(h[0]))


def _sqrt(x: Tensor) -> Tensor:
    """Rounded correctly. torch's on the CPU is a vector library's and is sometimes off in the last bit; in double precision that
    does not reach fp32: the root of a 24-bit number is never within 2^-51 of the middle between two."""
    if x.device.type == "cpu" and x.dtype is torch.float32:
        return x.double().sqrt_().float()
    return x.sqrt()


def cast(target: Tensor, source: Tensor, scale: float | Tensor) -> None:
    """target = source * scale, computed in fp32 (fp64 where either is fp64)."""
    wide = torch.float64 if torch.float64 in (target.dtype, source.dtype) else torch.float32
    target.copy_(source.to(wide) * scale)


def squares(source: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of squares in fp64, count of elements that are not finite in int64), 0-dim, on the device of `source`.

    The order of the sum depends on the number of elements only: see csrc/update/squares.cpp.
    """
    flat = source.reshape(-1)
    bad = flat.numel() - torch.isfinite(flat).sum(dtype=torch.int64)
    if not flat.numel():
        return torch.zeros((), dtype=torch.float64, device=flat.device), bad
    blocks = (flat.numel() + _BLOCK - 1) // _BLOCK
    padded = torch.zeros(blocks * _BLOCK, dtype=torch.float64, device=flat.device)
    padded[: flat.numel()] = flat
    return _fold(_fold(padded.mul_(padded).view(blocks, _BLOCK).T)), bad


def _fold(rows: Tensor) -> Tensor:
    """Adds the upper half of the rows to the lower one until one is left."""
    n = rows.shape[0]
    while n > 1:
        half = (n + 1) // 2
        rows = torch.cat((rows[: n - half] + rows[half:n], rows[n - half : half]))
        n = half
    return rows[0]
