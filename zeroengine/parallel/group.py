"""The ranks that share one sequence, and attention over them: Ulysses, a ring, or both on a 2-D mesh (USP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroengine.comm.fabric import Fabric
from zeroengine.comm.local import LocalCommunicator
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError
from zeroengine.parallel.kernels import wide
from zeroengine.parallel.layout import SequenceLayout, Span
from zeroengine.parallel.masks import AttentionMask, Block, Kind
from zeroengine.parallel.ring import Ring, attend
from zeroengine.parallel.ulysses import over_heads


@dataclass(frozen=True)
class SequenceGroup:
    """`heads`: the ranks that trade sequence for heads; `ring`: the ranks around which keys travel. The rank in the whole
    group is ring.rank * heads.size + heads.rank."""

    heads: Communicator
    ring: Communicator
    zigzag: bool = True

    @property
    def size(self) -> int:
        return self.heads.size * self.ring.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.heads.size + self.heads.rank

    def layout(self, length: int) -> SequenceLayout:
        """Where the tokens of a sequence of `length` lie."""
        return SequenceLayout(length, self.ring.size, self.heads.size, self.zigzag)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: AttentionMask, *,
        scale: float | None = None, dropout: float = 0.0, subject: str = "attention",
    ) -> Tensor:  # fmt: skip
        """Exact attention of this rank's tokens. q [B, H, local, D], k and v [B, G, local, D]; returns [B, H, local, Dv].

        `mask` covers the padded sequence (`AttentionMask.over`). Collective, also in backward. Dropout needs a group
        without a ring: no rank of a ring sees a whole row of probabilities when it draws.
        """
        if dropout and self.ring.size > 1:
            raise ConfigError(
                f"{subject}: attention dropout {dropout} with a ring of {self.ring.size}; set the model's attention dropout to "
                '0, or use Ulysses alone (sequence_parallel.attention "ulysses")'
            )

        def local(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if dropout:
                return _with_dropout(queries, keys, values, layout, mask, scale, dropout)
            return attend(queries, keys, values, Ring(self.ring, layout, mask, subject), scale)

        return over_heads(q, k, v, self.heads, local, subject=subject)


def make_group(fabric: Fabric, ranks: Sequence[int], ulysses: int, zigzag: bool = True, name: str = "sequence") -> SequenceGroup:
    """Streams over `ranks` (ascending) that share a sequence, `ulysses` neighbours trading heads; `name` is theirs in `fabric`.
    Collective over `ranks`.

    Raises `ConfigError` if `ulysses` does not divide the number of ranks.
    """
    size = len(ranks)
    if ulysses < 1 or size % ulysses:
        raise ConfigError(
            f"sequence_parallel.ulysses {ulysses} does not divide the {size} ranks of a sequence "
            f"({size} / {ulysses} = {size / max(ulysses, 1):.2f} for the ring); give a divisor"
        )
    ring, slot = divmod(list(ranks).index(fabric.rank), ulysses)
    return SequenceGroup(
        fabric.communicator(f"{name} heads", ranks[ring * ulysses : (ring + 1) * ulysses]),
        fabric.communicator(f"{name} ring", ranks[slot::ulysses]),
        zigzag,
    )


def alone(rank: int = 0) -> SequenceGroup:
    """A group of one rank."""
    return SequenceGroup(LocalCommunicator("sequence heads", rank), LocalCommunicator("sequence ring", rank))


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: AttentionMask, scale: float | None, dropout: float
) -> Tensor:
    whole = Span(0, layout.padded)
    allowed = mask.allowed(Block(whole, whole, 0, 0, Kind.MASKED), q.device)
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).to(wide(q.dtype))
    scores = (scores * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~allowed, torch.finfo(scores.dtype).min)
    p = F.dropout(scores.softmax(-1) * allowed, dropout).to(q.dtype)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
