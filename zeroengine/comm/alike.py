"""Whether the ranks have the same lines of text: parameters of a model, options of an optimizer, keys of a configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from zeroengine.comm.protocol import Communicator


@dataclass(frozen=True)
class Difference:
    """`counts`: "rank 0: 3, rank 1: 4" where the ranks have other numbers of lines; else line `at` differs, and `odd` are the
    ranks whose line is not that of the group's first rank."""

    counts: str | None
    at: int = 0
    odd: tuple[int, ...] = ()


def digest_of_lines(lines: list[str], bits: int = 56) -> int:
    """A non-negative number of so many bits that tells lists of lines apart."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> (64 - bits)


def are_alike(lines: list[str], control: Communicator, subject: str) -> bool:
    """Whether all ranks of `control` have these lines. Collective."""
    value = digest_of_lines(lines)
    facts = torch.tensor([value, -value], dtype=torch.int64)
    control.all_reduce(facts, subject, op="max").wait()
    return int(facts[0]) == -int(facts[1])


def find_difference(lines: list[str], control: Communicator, subject: str) -> Difference:
    """Where lists that are known to differ do. Collective."""
    counts = control.exchange(torch.tensor([len(lines)]), f"number of {subject}").flatten().tolist()
    if len(set(counts)) > 1:
        return Difference(", ".join(f"rank {r}: {int(n)}" for r, n in zip(control.ranks, counts, strict=True)))
    table = control.exchange(torch.tensor([digest_of_lines([line]) for line in lines], dtype=torch.int64), subject)
    differs = (table != table[0]).any(0).nonzero()
    at = int(differs[0]) if len(differs) else 0
    return Difference(None, at, tuple(control.ranks[r] for r in range(control.size) if table[r, at] != table[0, at]))
