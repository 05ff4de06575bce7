"""Differentiable movements of rows between ranks; backward is the reverse movement.

A movement is issued by one autograd node and completed by another, so that what is computed between the two, a shared
expert, hides it: in forward, and in backward too, where autograd runs the nodes in the reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator, Work
from zeroengine.moe.group import Wire
from zeroengine.moe.plan import invert

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_SCALE_BYTES = 4  # one fp32 factor a row


def encode(rows: Tensor, wire: Wire) -> Tensor:
    """What travels of `rows` [N, H]: the rows, in bf16, or as bytes [N, H + 4] of fp8 (e4m3) and one fp32 factor a row."""
    if wire == "same":
        return rows.contiguous()
    if wire == "bf16":
        return rows.to(torch.bfloat16).contiguous()
    rows = rows.contiguous()
    scale = rows.detach().abs().amax(1, keepdim=True).float().clamp_min(1e-12) / _FP8_MAX
    values = (rows.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8).view(torch.uint8)
    # A copy: `contiguous` leaves a column whose stride says nothing as it is, and bytes can only be seen in one with stride 1.
    return torch.cat([values, scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)], 1)


def decode(sent: Tensor, wire: Wire, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`."""
    if wire != "fp8":
        return sent.to(dtype)
    width = sent.shape[1] - _SCALE_BYTES
    scale = sent[:, width:].contiguous().view(torch.float32)
    return (sent[:, :width].contiguous().view(_FP8).float() * scale).to(dtype)


class Movement:
    """One movement of rows of `comm`: `sends[j]` rows to rank j, `receives[i]` from rank i. `wire`: type of the rows on the
    way, `back`: of their gradients."""

    def __init__(
        self, comm: Communicator, sends: Sequence[int], receives: Sequence[int], subject: str, wire: Wire = "same",
        back: Wire = "same",
    ) -> None:  # fmt: skip
        self.comm, self.subject, self.wire, self.back = comm, subject, wire, back
        self.sends, self.receives = list(sends), list(receives)
        self._flying: tuple[Work, Tensor, Tensor] | None = None

    def issue(self, rows: Tensor, reverse: bool = False) -> None:
        wire, subject = (self.back, f"{self.subject}: gradients") if reverse else (self.wire, self.subject)
        sends, receives = (self.receives, self.sends) if reverse else (self.sends, self.receives)
        sent = encode(rows.detach(), wire)
        width = sent.shape[1]
        got = torch.empty(sum(receives), width, dtype=sent.dtype, device=sent.device)
        work = self.comm.all_to_all(
            got.view(-1), sent.view(-1), subject,
            output_splits=[n * width for n in receives], input_splits=[n * width for n in sends],
        )  # fmt: skip
        self._flying = (work, got, sent)

    def complete(self, dtype: torch.dtype, reverse: bool = False) -> Tensor:
        if self._flying is None:
            raise RuntimeError(f"{self.subject}: completed before it was issued")
        work, got, _ = self._flying
        self._flying = None
        work.wait()
        return decode(got, self.back if reverse else self.wire, dtype)


class _Issue(torch.autograd.Function):
    """Returns a stand-in of the right shape for what will arrive."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, movement: Movement) -> Tensor:
        ctx.movement, ctx.dtype = movement, rows.dtype
        movement.issue(rows)
        return rows.new_zeros(1).expand(sum(movement.receives), rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.movement.complete(ctx.dtype, reverse=True), None


class _Complete(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, movement: Movement) -> Tensor:
        ctx.movement, ctx.shape = movement, stand_in.shape
        return movement.complete(stand_in.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.movement.issue(grad, reverse=True)
        return grad.new_zeros(1).expand(ctx.shape), None


def issue(rows: Tensor, movement: Movement) -> Tensor:
    """Starts to move `rows` [N, H]; `complete` takes what this returns."""
    if movement.comm.size == 1:
        return rows
    out: Tensor = _Issue.apply(rows, movement)
    return out


def complete(stand_in: Tensor, movement: Movement) -> Tensor:
    """The rows that arrived, [sum(receives), H], in order of the ranks they came from."""
    if movement.comm.size == 1:
        return stand_in
    out: Tensor = _Complete.apply(stand_in, movement)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, inverse = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], `inverse` being the inverse permutation: backward gathers too, and adds nothing."""
    out: Tensor = _Permute.apply(rows, order, inverse)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k, ctx.tokens = k, tokens.shape[0]
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _at(grad, order, ctx.tokens * ctx.k).view(ctx.tokens, ctx.k, grad.shape[1]).sum(1), None, None


def spread(tokens: Tensor, order: Tensor, k: int) -> Tensor:
    """Rows order // k of `tokens` [T, H]: the token of each of T * k assignments, those of `order`."""
    out: Tensor = _Spread.apply(tokens, order, k)
    return out


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, total: int) -> Tensor:
        ctx.save_for_backward(order)
        return _at(rows, order, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


def place(rows: Tensor, order: Tensor, total: int) -> Tensor:
    """[total, H] with `rows` at the places `order` (all different) and zeros elsewhere."""
    out: Tensor = _Place.apply(rows, order, total)
    return out


def _at(rows: Tensor, order: Tensor, total: int) -> Tensor:
    if order.numel() == total:  # reads whole rows where a write by index goes element by element
        return rows.index_select(0, invert(order))
    full = rows.new_zeros(total, rows.shape[1])
    full[order] = rows
    return full


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator, averaged: float, subject: str) -> Tensor:
        ctx.averaged = averaged
        table = comm.exchange(values.detach().double().cpu(), subject)
        return table.sum(0).to(device=values.device, dtype=values.dtype).view(values.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.averaged, None, None, None


def sum_over_ranks(values: Tensor, comm: Communicator, averaged: float, subject: str) -> Tensor:
    """Sum over the ranks of `comm` (control) in fixed order, the same bits on each. Every rank uses the sum in its own loss,
    and gradients are added up and divided by `averaged` afterwards: so the derivative is multiplied by that."""
    if comm.size == 1:
        return values
    out: Tensor = _SumOverRanks.apply(values, comm, averaged, subject)
    return out
