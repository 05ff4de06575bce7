"""Losses over tokens that are spread over ranks: averaged by valid tokens, as one process would."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroengine.comm.protocol import Communicator

IGNORED = -100
"""Label of a token without a target, as in `torch.nn.functional.cross_entropy`."""


def next_token_targets(labels: Tensor) -> Tensor:
    """Targets of causal language modelling for *whole* sequences [B, S]: the label of the next token, none for the last.

    Shift before a sequence is cut: a rank's slice does not know the token after its last one.
    """
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


class _Reported(torch.autograd.Function):
    """The value is `value`, the gradient that of `local`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def token_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies of tokens, in fp32 (fp64 for fp64). logits [..., V], targets [...], -100 has no loss."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def mean_over_ranks(local_sum: Tensor, local_count: Tensor | int, ranks: Communicator, factor: float) -> Tensor:
    """The mean loss of a token over all `ranks` (a control communicator): the same value on each.

    `local_sum`: summed loss of this rank's tokens; `local_count`: how many have one. The gradient is that of
    factor * local_sum / count, where `factor` undoes what the reduction of gradients divides by. Without any valid token
    the loss is 0, and so are its gradients. Collective.
    """
    mine = torch.tensor([float(local_sum.detach()), float(local_count)], dtype=torch.float64)
    total, count = ranks.exchange(mine, "loss and valid tokens").sum(0).tolist()
    value = torch.tensor(total / max(count, 1.0), dtype=local_sum.dtype, device=local_sum.device)
    reported: Tensor = _Reported.apply(local_sum * (factor / max(count, 1.0)), value)
    return reported
