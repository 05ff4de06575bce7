"""Attention of one block with its log-sum-exp, forward and backward: torch's own kernels, and a twin in plain torch.

Shapes: q [B, H, Sq, D], k [B, G, Sk, D], v [B, G, Sk, Dv] with H a multiple of G; out [B, H, Sq, Dv]; lse [B, H, Sq] in
the wide type (fp32, or fp64 for fp64), -inf for a row without keys. `backward` takes the out and lse of *all* blocks of a
row, which makes it the exact share of this block (FlashAttention-2, Dao 2023, section 3.1; Liu et al. 2023 for rings).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from zeroengine.parallel.masks import Kind

_ROWS = 1024  # rows of scores that the twin holds at once
_Grads = tuple[Tensor, Tensor, Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Type in which partial results are kept."""
    return torch.promote_types(dtype, torch.float32)


class Kernel(Protocol):
    """One way to compute a block. `allowed` [B or 1, 1, Sq, Sk] goes with `Kind.MASKED`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, kind: Kind, allowed: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, kind: Kind,
        allowed: Tensor | None,
    ) -> _Grads: ...  # fmt: skip


class Twin:
    """Plain torch, on every device and for every type; scores of at most `_ROWS` rows at a time, in the wide type."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, kind: Kind, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        outs, sums = [], []
        keys, values = _expand(k, q).to(wide(k.dtype)), _expand(v, q).to(wide(v.dtype))
        for at in range(0, max(q.shape[2], 1), _ROWS):
            scores = self._scores(q, keys, scale, kind, allowed, at)
            lse = torch.logsumexp(scores, -1)
            outs.append(torch.exp(scores - _finite(lse)[..., None]) @ values)
            sums.append(lse)
        return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, kind: Kind,
        allowed: Tensor | None,
    ) -> _Grads:  # fmt: skip
        type_ = wide(q.dtype)
        keys, values = _expand(k, q).to(type_), _expand(v, q).to(type_)
        dk, dv, dqs = torch.zeros_like(keys), torch.zeros_like(values), []
        for at in range(0, max(q.shape[2], 1), _ROWS):
            rows = slice(at, at + _ROWS)
            g, queries = grad[:, :, rows].to(type_), q[:, :, rows].to(type_)
            p = torch.exp(self._scores(q, keys, scale, kind, allowed, at) - _finite(lse[:, :, rows])[..., None])
            delta = (g * out[:, :, rows].to(type_)).sum(-1, keepdim=True)
            ds = p * (g @ values.mT - delta) * scale
            dv += p.mT @ g
            dk += ds.mT @ queries
            dqs.append(ds @ keys)
        return torch.cat(dqs, 2), _fold(dk, k), _fold(dv, v)

    @staticmethod
    def _scores(q: Tensor, keys: Tensor, scale: float, kind: Kind, allowed: Tensor | None, at: int) -> Tensor:
        rows = q[:, :, at : at + _ROWS].to(keys.dtype)
        scores = rows @ keys.mT * scale
        if kind is Kind.DIAGONAL:
            i = torch.arange(at, at + rows.shape[2], device=q.device)[:, None]
            return scores.masked_fill(torch.arange(keys.shape[2], device=q.device) > i, -math.inf)
        return scores if allowed is None else scores.masked_fill(~allowed[:, :, at : at + _ROWS], -math.inf)


class CpuFlash:
    """torch's flash attention for CPUs. It takes as many key heads as query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, kind: Kind, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, _expand(k, q), _expand(v, q), 0.0, kind is Kind.DIAGONAL, attn_mask=_bias(allowed, q), scale=scale
        )
        if allowed is not None:  # the kernel says 0 for rows without keys
            lse = lse.masked_fill(~allowed.any(-1), -math.inf)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, kind: Kind,
        allowed: Tensor | None,
    ) -> _Grads:  # fmt: skip
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, _expand(k, q), _expand(v, q), out, _finite(lse).contiguous(), 0.0, kind is Kind.DIAGONAL,
            attn_mask=_bias(allowed, q), scale=scale,
        )  # fmt: skip
        return dq, _fold(dk, k), _fold(dv, v)


class CudaFlash:
    """torch's FlashAttention-2 for 16-bit CUDA tensors; blocks with an explicit mask go to the twin."""

    def __init__(self) -> None:
        self._twin = Twin()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, kind: Kind, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        if kind is Kind.MASKED:
            return self._twin.forward(q, k, v, scale, kind, allowed)
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q, _expand(k, q), _expand(v, q), 0.0, kind is Kind.DIAGONAL, False, scale=scale
        )
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, kind: Kind,
        allowed: Tensor | None,
    ) -> _Grads:  # fmt: skip
        if kind is Kind.MASKED:
            return self._twin.backward(grad, q, k, v, out, lse, scale, kind, allowed)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # no dropout: no random state
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, _expand(k, q), _expand(v, q), out, _finite(lse).contiguous(), None, None, q.shape[2], k.shape[2],
            0.0, kind is Kind.DIAGONAL, unused, unused, scale=scale,
        )  # fmt: skip
        return dq, _fold(dk, k), _fold(dv, v)


def kernel_for(q: Tensor, v: Tensor) -> Kernel:
    """The fastest kernel that is right for these tensors."""
    if q.shape[-1] != v.shape[-1]:
        return Twin()
    if q.device.type == "cpu" and q.dtype.is_floating_point:
        return CpuFlash()
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return CudaFlash()
    return Twin()


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """Key heads repeated for the query heads that share them."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _fold(grad: Tensor, x: Tensor) -> Tensor:
    """Back from `_expand`, summed in the wide type."""
    if grad.shape == x.shape:
        return grad
    b, g, s, d = x.shape
    return grad.view(b, g, -1, s, d).to(wide(grad.dtype)).sum(2)


def _finite(lse: Tensor) -> Tensor:
    """A row without keys has the probabilities exp(-inf - 0) = 0, not NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _bias(allowed: Tensor | None, q: Tensor) -> Tensor | None:
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(~allowed, -math.inf)
