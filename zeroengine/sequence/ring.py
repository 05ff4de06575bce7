"""`ring_attention`: exact attention over a sequence spread over a ring of ranks."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.parallel.layout import SequenceLayout
from zeroengine.parallel.masks import AttentionMask, documents_from_lengths
from zeroengine.parallel.ring import Ring, attend

__all__ = ["AttentionMask", "SequenceLayout", "documents_from_lengths", "ring_attention", "ring_layout"]


def ring_layout(length: int, group: Communicator, layout: Literal["zigzag", "contiguous"] = "zigzag") -> SequenceLayout:
    """Where the tokens of a sequence of `length` lie; its `shard` cuts a batch, its `unshard` puts parts together."""
    if layout not in ("zigzag", "contiguous"):
        raise ValueError(f"layout {layout!r} is neither 'zigzag' nor 'contiguous'")
    return SequenceLayout(length, ring=group.size, zigzag=layout == "zigzag")


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Communicator, layout: SequenceLayout | None = None, *,
    causal: bool = True, window: int | None = None, documents: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of this rank's tokens to those of all ranks. Collective, also in backward.

    query [B, H, local, D], key and value [B, G, local, D]; `layout` says where tokens lie (`ring_layout`; default: zigzag,
    nothing padded). `window`: reach in tokens. `documents` [B or 1, all tokens] numbers the documents packed in a row.
    Returns [B, H, local, D]. Equal to one process' attention within the rounding of the inputs' type, whatever the
    number of ranks: partial results are merged in fp32.
    """
    if layout is None:
        layout = SequenceLayout(query.shape[2] * group.size, ring=group.size)
    mask = AttentionMask(causal, window, documents).over(layout)
    return attend(query, key, value, Ring(group, layout, mask, "ring_attention"), scale)
