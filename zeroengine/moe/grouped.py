"""One map for each block of rows, linear or of two layers: torch's grouped matmul where it runs, a loop over the blocks elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def grouped_mlp(
    x: Tensor, first: Tensor, second: Tensor, counts: list[int], act: Callable[[Tensor], Tensor], first_bias: Tensor | None = None,
    second_bias: Tensor | None = None, adds: bool = True,
) -> Tensor:  # fmt: skip
    """Rows of `x` [N, in] by blocks of `counts` (sum N), block e to act(x @ first[e].T + first_bias[e]) @ second[e].T + second_bias[e]:
    [N, out]. `act` works on rows and has no parameters; it may change their width. `first` [len(counts), inner, in], `second`
    [len(counts), out, width of act]. Without `adds` the last bias is left out, and has the gradient of one that was added.

    Of what lies between the layers only the input of `act` is kept for backward; its output is computed again there.
    """
    x, first, second, first_bias, second_bias = _autocast(x, first, second, first_bias, second_bias)  # type: ignore[assignment]
    if not (has_grouped_mm(x, first) and has_grouped_mm(x, second)):
        out: Tensor = _Mlp.apply(x, first, second, first_bias, second_bias, tuple(counts), act, adds)
        return out
    inner = grouped_linear(x, first, counts)
    inner = inner if first_bias is None else inner + grouped_bias(first_bias, counts)
    out = grouped_linear(act(inner), second, counts)
    if second_bias is None:
        return out
    added = grouped_bias(second_bias, counts)
    return out + (added if adds else added - added.detach())


def _autocast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *others]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if t is None else t.to(dtype) for t in (x, *others)]


def grouped_linear(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Rows of `x` [N, in] by blocks of `counts` (sum N), block e times weight[e].T; `weight` [len(counts), out, in].
    Returns [N, out]. The gradient of a weight without rows is zero."""
    x, weight = _autocast(x, weight)  # type: ignore[assignment]
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


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Tensor, second: Tensor, first_bias: Tensor | None, second_bias: Tensor | None,
        counts: tuple[int, ...], act: Callable[[Tensor], Tensor], adds: bool,
    ) -> Tensor:  # fmt: skip
        inner = x.new_empty(x.shape[0], first.shape[1])
        out = x.new_empty(x.shape[0], second.shape[1])
        for e, rows in _blocks(counts):
            _linear(x[rows], first[e], None if first_bias is None else first_bias[e], inner[rows])
            _linear(act(inner[rows]), second[e], second_bias[e] if second_bias is not None and adds else None, out[rows])
        ctx.save_for_backward(x, inner, first, second)
        ctx.counts, ctx.act = counts, act
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, first, second = ctx.saved_tensors
        wants = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if wants[0] else None
        pair = first, second
        weights = [torch.empty_like(w, memory_format=torch.contiguous_format) if wants[1 + i] else None for i, w in enumerate(pair)]
        biases = [w.new_empty(w.shape[:2]) if wants[3 + i] else None for i, w in enumerate(pair)]
        for e in (e for e, n in enumerate(ctx.counts) if not n):
            for made in (*weights, *biases):
                if made is not None:
                    made[e].zero_()
        for e, rows in _blocks(ctx.counts):
            with torch.enable_grad():
                z = inner[rows].detach().requires_grad_()
                h = ctx.act(z)
            if weights[1] is not None:
                torch.mm(grad[rows].T, h.detach(), out=weights[1][e])
            if biases[1] is not None:
                torch.sum(grad[rows], 0, out=biases[1][e])
            if not (wants[0] or wants[1] or wants[3]):
                continue
            (grad_z,) = torch.autograd.grad(h, z, torch.mm(grad[rows], second[e]))
            if weights[0] is not None:
                torch.mm(grad_z.T, x[rows], out=weights[0][e])
            if biases[0] is not None:
                torch.sum(grad_z, 0, out=biases[0][e])
            if grad_x is not None:
                torch.mm(grad_z, first[e], out=grad_x[rows])
        return grad_x, *weights, *biases, None, None, None


def _blocks(counts: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """(number, rows) of the blocks that have rows."""
    at = 0
    for e, n in enumerate(counts):
        if n:
            yield e, slice(at, at + n)
        at += n


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


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
