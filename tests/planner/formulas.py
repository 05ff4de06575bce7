"""Activation memory of a transformer block by formula, to hold against what a rehearsal counts.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4: a block of GPT-2's form with
dropout keeps 34 s b h + 5 a s^2 b bytes for 16-bit activations (equation 1). With t tensor ranks 10 + 24/t take the place of
34, and with the sequence split as well (equations 2 and 4) all of it is divided by t. Flash attention (Dao et al., 2022) keeps no
scores: the term in s^2 goes, and one fp32 sum for each head and token comes, 4 a s b. A block that is recomputed keeps its
input, 2 s b h. With c ranks that share a sequence, s / c takes the place of s in the terms that are linear in it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockShape:
    """`sequence` s, `micro` b samples, `hidden` h, `heads` a."""

    sequence: int
    micro: int
    hidden: int
    heads: int


def block_activations(
    shape: BlockShape, *, tp: int = 1, sequence_parallel: bool = False, cp: int = 1, flash: bool = True, recompute: bool = False
) -> float:
    """Bytes that one block keeps from forward to backward, with 16-bit activations."""
    tokens = shape.sequence * shape.micro / cp
    width = tokens * shape.hidden
    if recompute:
        return 2 * width / (tp if sequence_parallel else 1)
    outside, inside = 10.0, 24.0
    linear = (outside + inside) / tp if sequence_parallel else outside + inside / tp
    scores = 4 * shape.heads * tokens if flash else 5 * shape.heads * shape.sequence * tokens
    return width * linear + scores / tp
