"""Which rank of the pipeline holds which stage."""

from __future__ import annotations


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Down through the ranks and up again, `chunks` times in all: with two, the first rank holds the first and last stage."""
    down = tuple(range(ranks))
    return tuple(r for chunk in range(chunks) for r in (down[::-1] if chunk % 2 else down))
