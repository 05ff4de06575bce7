"""`DistributedAttention`: DeepSpeed's name and meaning for Ulysses around any attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from zeroengine.comm.protocol import Communicator
from zeroengine.parallel.ulysses import over_heads

__all__ = ["DistributedAttention"]


class DistributedAttention(nn.Module):
    """Runs `local_attention` on this rank's heads of the whole sequence.

    `local_attention(query, key, value, *args, **kwargs)` sees the given order of dimensions, with the whole sequence and this
    rank's heads, and returns the shape of `query` (the last dimension may differ). `group`: a `Communicator` of the ranks
    that share the sequence. `scatter_idx` is the dimension of the heads, `gather_idx` that of the sequence: [sequence, batch,
    heads, D] by default, [batch, sequence, heads, D] with gather_idx=1, [batch, heads, sequence, D] with 1 and 2.
    Key and value may have fewer heads than the query (GQA, MQA), also fewer than there are ranks; no number needs to divide.
    """

    def __init__(self, local_attention: Callable[..., Tensor], group: Communicator, scatter_idx: int = 2, gather_idx: int = 0) -> None:
        super().__init__()
        if scatter_idx == gather_idx or not {scatter_idx, gather_idx} <= {0, 1, 2}:
            raise ValueError(
                f"scatter_idx {scatter_idx} (heads) and gather_idx {gather_idx} (sequence) must be two of the dimensions 0, 1, 2"
            )
        self.local_attention = local_attention
        self.group = group
        batch_idx = 3 - scatter_idx - gather_idx
        self._order = (batch_idx, scatter_idx, gather_idx, 3)
        self._back = tuple(self._order.index(i) for i in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, lengths: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """4-D tensors with this rank's tokens and all heads; returns the same for the output. `lengths`: tokens of each rank
        where they differ. Collective over the group, also in backward."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            there = (x.permute(self._back) for x in (q, k, v))
            return self.local_attention(*there, *args, **kwargs).permute(self._order)

        q, k, v = (x.permute(self._order) for x in (query, key, value))
        return over_heads(q, k, v, self.group, attention, lengths, "DistributedAttention").permute(self._back)
