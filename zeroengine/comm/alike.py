"""Whether the ranks have the same: lines of text (parameters of a model, options of an optimizer, keys of a configuration), numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from zeroengine.comm.protocol import Communicator


def digest_of_lines(lines: list[str], bits: int = 56) -> int:
    """A non-negative number of so many bits that tells lists of lines apart."""
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> (64 - bits)


def are_alike(lines: list[str], control: Communicator, subject: str) -> bool:
    """Whether all ranks of `control` have these lines. Collective."""
    value = digest_of_lines(lines)
    facts = torch.tensor([value, -value], dtype=torch.int64)
    control.all_reduce(facts, subject, op="max").wait()
    return int(facts[0]) == -int(facts[1])


def first_difference(lines: list[str], control: Communicator, what: str) -> str:
    """Says where lists of `what` ("options") that are known to differ do so first. Collective."""
    me = control.ranks[control.rank]
    counts = control.exchange(torch.tensor([len(lines)]), f"number of {what}").flatten().tolist()
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {r}: {int(n)}" for r, n in zip(control.ranks, counts, strict=True))
        return f"rank {me}: another number of {what} on each rank ({told})"
    table = control.exchange(torch.tensor([digest_of_lines([line]) for line in lines], dtype=torch.int64), what)
    differs = (table != table[0]).any(0).nonzero()
    at = int(differs[0]) if len(differs) else 0
    odd = odd_ranks(table[:, at].tolist(), control.ranks)
    return f"rank {me}: {what} are not the same on all ranks: here it is '{lines[at]}' (number {at}), and {differ(odd, control.ranks)}"


def odd_ranks(values: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` whose value is not that of the first."""
    return [rank for rank, value in zip(ranks, values, strict=True) if value != values[0]]


def differ(odd: Sequence[int], ranks: Sequence[int]) -> str:
    """In words, what `odd_ranks` found among `ranks`."""
    return f"ranks {list(odd)} differ from rank {ranks[0]}"
