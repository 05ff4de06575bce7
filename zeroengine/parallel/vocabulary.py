"""Layers and the loss of a vocabulary that is cut over a tensor group: embeddings by rows, logits that are never gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.comm.protocol import Communicator
from zeroengine.parallel.loss import IGNORED, next_token_targets
from zeroengine.parallel.tensor_ops import Region


def split_lookup(name: str, module: nn.Module, comm: Communicator, rows: int) -> list[Any]:
    """Makes an embedding whose weight has this rank's `rows` of the vocabulary look tokens up in those of all ranks. Returns the
    handles that undo it. Each rank finds its own tokens, zeros for the others, and one all-reduce adds them up."""
    region, first = Region(comm), comm.rank * rows
    outside: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        local = args[0] - first
        absent = (local < 0) | (local >= rows)
        outside.append(absent)
        return (local.masked_fill(absent, 0), *args[1:])

    def after(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        return region.leave(out.masked_fill(outside.pop()[..., None], 0.0), name)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


class VocabularyLoss:
    """Takes the place of a transformers model's loss function where its logits are this rank's slice of the vocabulary."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __deepcopy__(self, memo: Any) -> VocabularyLoss:
        return self  # a copy of the model has the same parts on the same ranks

    def __call__(
        self, logits: Tensor, labels: Tensor, vocab_size: int | None = None, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED, shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Mean cross entropy of the next tokens, or their sum / `num_items_in_batch`. logits [B, S, V/N], labels [B, S]."""
        targets = next_token_targets(labels) if shift_labels is None else shift_labels
        targets = targets.masked_fill(targets == ignore_index, IGNORED).to(logits.device)
        count = num_items_in_batch if num_items_in_batch is not None else (targets != IGNORED).sum()
        return self.total(logits, targets) / count

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropies; targets as they are to be compared, -100 has no loss."""
        return vocabulary_cross_entropy(logits, targets, self._comm)


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, comm: Communicator, ignored: int = IGNORED) -> Tensor:
    """Sum of cross entropies where each rank has a slice of the vocabulary; logits are never gathered.

    logits [..., V/N] (equal slices in order of rank), targets [...] of the whole vocabulary; returns a scalar in fp32 (fp64),
    the same on every rank. Sends three numbers a token. Collective.
    """
    out: Tensor = _VocabularyLoss.apply(logits.flatten(0, -2), targets.flatten(), comm, ignored)
    return out


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: Communicator, ignored: int) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = wide.amax(-1)
        comm.all_reduce(top, "largest logit", op="max").wait()
        p = torch.exp(wide - top[:, None])
        valid = targets != ignored
        local = targets - comm.rank * logits.shape[1]
        mine = valid & (local >= 0) & (local < logits.shape[1])
        local = local.clamp(0, logits.shape[1] - 1)
        picked = wide.gather(1, local[:, None])[:, 0].masked_fill(~mine, 0.0)
        sums = torch.stack([p.sum(-1), picked])
        comm.all_reduce(sums, "sums of the softmax").wait()
        ctx.save_for_backward(p.div_(sums[0][:, None]), local, mine, valid)
        ctx.dtype = logits.dtype
        return ((sums[0].log() + top - sums[1]) * valid).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, local, mine, valid = ctx.saved_tensors
        found = p * valid[:, None]
        found.scatter_add_(1, local[:, None], -mine[:, None].to(found.dtype))
        return (found * grad).to(ctx.dtype), None, None, None
