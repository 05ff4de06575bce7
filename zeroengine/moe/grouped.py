"""One linear map for each block of rows: torch's grouped matmul where it runs, a loop over the blocks elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ALIGN = 16  # bytes of a row that torch's grouped matmul wants


def has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's kernel for grouped matmuls runs for these. On the CPU it is itself a loop, which saves nothing."""
    return (
        x.device.type == "cuda"
        and x.dtype is torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and all(size * x.element_size() % _ALIGN == 0 for size in weight.shape[1:])
    )


def grouped_linear(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Rows of `x` [N, in] by blocks of `counts` (sum N), block e times weight[e].T; `weight` [len(counts), out, in].
    Returns [N, out]. The gradient of a weight without rows is zero."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if has_grouped_mm(x, weight):
        ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
        return F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    out: Tensor = _Loop.apply(x, weight, tuple(counts))
    return out


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        at = 0
        for e, n in enumerate(counts):
            if n:
                torch.mm(x[at : at + n], weight[e].T, out=out[at : at + n])
            at += n
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wants_weight else None
        at = 0
        for e, n in enumerate(ctx.counts):
            rows = grad[at : at + n]
            if grad_x is not None and n:
                torch.mm(rows, weight[e], out=grad_x[at : at + n])
            if grad_weight is not None:
                if n:
                    torch.mm(rows.T, x[at : at + n], out=grad_weight[e])
                else:
                    grad_weight[e].zero_()
            at += n
        return grad_x, grad_weight, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.counts = counts
        return bias.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device=bias.device), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.counts:
            return grad.new_zeros(0, grad.shape[1]), None
        return torch.stack([part.sum(0) for part in grad.split(list(ctx.counts))]), None


def grouped_bias(bias: Tensor, counts: list[int]) -> Tensor:
    """bias[e] for each row of block e: [N, out]."""
    out: Tensor = _Rows.apply(bias, tuple(counts))
    return out
