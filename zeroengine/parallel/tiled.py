"""Long sequences in less memory: work along the sequence in tiles, and checkpointed activations kept on the host.

Arctic Long Sequence Training (Bekman et al. 2025). Tiling does not change results: the layers here act on each token by
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroengine.offload.activations import OnHost
from zeroengine.parallel.loss import token_sum


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    """`function` (an MLP) of [B, S, ...] on `tile` tokens at a time; each tile is computed again in backward, so that inner
    activations of one tile exist at a time. `function` must act on each token by itself."""
    if tile < 1:
        raise ValueError(f"a tile of {tile} tokens; it must be at least 1")
    if x.shape[1] <= tile:
        return function(x)
    return torch.cat([_again(function, part) for part in x.split(tile, 1)], 1)


def tiled_loss_sum(hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, tile: int) -> Tensor:
    """Sum of the cross entropies of head(hidden) against `targets` [B, S] (-100: none) without ever holding all logits:
    `tile` tokens at a time, computed again in backward. hidden [B, S, D]; divide by the number of valid tokens, or give it to
    `zeroengine.parallel.loss.mean_over_ranks`."""
    if tile < 1:
        raise ValueError(f"a tile of {tile} tokens; it must be at least 1")
    if hidden.shape[:2] != targets.shape:
        raise ValueError(f"hidden states of shape {tuple(hidden.shape)} and targets of shape {tuple(targets.shape)}")

    def one(h: Tensor, t: Tensor) -> Tensor:
        return token_sum(head(h), t)

    sums = [_again(one, h, t) for h, t in zip(hidden.split(tile, 1), targets.split(tile, 1), strict=True)]
    return torch.stack(sums).sum()


def _again(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, *args, use_reentrant=False)
    return out


class TiledMLP(nn.Module):
    """`mlp` on `tile` tokens at a time. State and names of parameters: those of `mlp`, below the name "mlp"."""

    def __init__(self, mlp: nn.Module, tile: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D']."""
        return tiled(self.mlp, x, self.tile)


def checkpoint_on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Activation checkpointing whose kept inputs wait in host memory. On the CPU it is plain checkpointing: they are there.

    One of the tensors `args` must require a gradient. Copies go to and from pinned memory in the order of the stream.
    """

    def to_host(t: Tensor) -> Tensor | OnHost:
        stays = t.device.type == "cpu" or not t.is_floating_point() or isinstance(t, nn.Parameter)
        return t if stays else OnHost(t, pin=True)

    def back(packed: Tensor | OnHost) -> Tensor:
        return packed.unpack() if isinstance(packed, OnHost) else packed

    with torch.autograd.graph.saved_tensors_hooks(to_host, back):
        # the reentrant form is the one that keeps its inputs as saved tensors; what it computes inside is not recorded
        return checkpoint(function, *args, use_reentrant=True)
