"""Where assignments of tokens to experts are computed: placement of experts, copies of hot ones, and the order of rows.

Every rank knows how many assignments each rank has for each expert (`counts`), so every rank works out the same plan, and
all sizes and permutations follow without another message.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroengine.moe.group import ExpertGroup


@dataclass(frozen=True)
class Share:
    """`number` assignments of `expert` are computed on rank `host`."""

    expert: int
    host: int
    number: int


def even_shares(loads: list[int], ranks: int) -> list[Share]:
    """Shares of experts (expert e lives on rank e // (E / ranks)) that make all ranks' loads equal up to one assignment.

    A rank gives away to, and takes from, as in Walker's alias method (1977): it fills up from one other rank at most, hence
    hosts copies of at most E / ranks experts beside its own, and that always suffices. Own shares come first.
    """
    local = len(loads) // ranks
    left = [list(loads[r * local : (r + 1) * local]) for r in range(ranks)]
    total = sum(loads)
    target = [total // ranks + (r < total % ranks) for r in range(ranks)]
    given: list[Share] = []
    settled = [False] * ranks
    for _ in range(ranks):
        open_ranks = [r for r in range(ranks) if not settled[r]]
        poor = min(open_ranks, key=lambda r: (sum(left[r]) - target[r], r))
        lack = target[poor] - sum(left[poor])
        settled[poor] = True
        if lack <= 0:
            continue
        rich = max(open_ranks, key=lambda r: (sum(left[r]) - target[r], -r))
        for e in sorted(range(local), key=lambda e: (-left[rich][e], e)):
            number = min(lack, left[rich][e])
            if number:
                given.append(Share(rich * local + e, poor, number))
                left[rich][e] -= number
                lack -= number
    own = [Share(r * local + e, r, left[r][e]) for r in range(ranks) for e in range(local)]
    return own + given


@dataclass(frozen=True)
class Placement:
    """What each rank computes. `slots[r]`: experts of rank r, its own first and then copies; `first[r]`: number of the first
    of them when all slots are counted through; `shares[e]`: (slot, assignments) of expert e, in the order in which they
    are filled."""

    local: int
    slots: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    shares: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def number(self) -> int:
        return self.first[-1] + len(self.slots[-1])

    @property
    def copied(self) -> bool:
        return self.number > self.local * len(self.slots)

    def copies(self, rank: int) -> tuple[int, ...]:
        """Experts of other ranks of which `rank` has copies."""
        return self.slots[rank][self.local :]


def place_experts(loads: list[int], group: ExpertGroup) -> Placement:
    """The placement for these loads of all experts: contiguous, with copies where the group asks for them."""
    ranks = group.size
    local = len(loads) // ranks
    home = [Share(e, e // local, n) for e, n in enumerate(loads)]
    chosen = home
    if group.copies and ranks > 1:
        held = [sum(loads[r * local : (r + 1) * local]) for r in range(ranks)]
        if max(held) * ranks > group.tolerance * sum(held):
            chosen = even_shares(loads, ranks)
    slots: list[list[int]] = [list(range(r * local, (r + 1) * local)) for r in range(ranks)]
    by_host: dict[int, list[Share]] = defaultdict(list)
    for s in chosen:
        if s.expert // local != s.host:
            slots[s.host].append(s.expert)
        by_host[s.host].append(s)
    first = [0]
    for r in range(ranks - 1):
        first.append(first[-1] + len(slots[r]))
    filled: list[list[tuple[int, int]]] = [[] for _ in loads]
    for s in chosen:
        filled[s.expert].append((first[s.host] + slots[s.host].index(s.expert), s.number))
    return Placement(local, tuple(map(tuple, slots)), tuple(first), tuple(map(tuple, filled)))


def slot_counts(counts: Tensor, placement: Placement) -> Tensor:
    """[ranks, slots]: how many assignments of each rank each slot computes. `counts` [ranks, E] on the CPU. An expert's
    assignments are taken in the order of ranks."""
    if not placement.copied:
        return counts
    found = torch.zeros(counts.shape[0], placement.number, dtype=counts.dtype)
    ends = counts.cumsum(0)
    for e, shares in enumerate(placement.shares):
        start = 0
        for slot, number in shares:
            lo = (ends[:, e] - counts[:, e]).clamp(start, start + number)
            hi = ends[:, e].clamp(start, start + number)
            found[:, slot] = hi - lo
            start += number
    return found


def slots_of(experts: Tensor, counts: Tensor, placement: Placement, rank: int) -> Tensor:
    """The slot of each of this rank's assignments, given their experts [A], sorted."""
    if not placement.copied:
        return experts
    slots = torch.empty_like(experts)
    mine = counts[rank].tolist()
    before = counts[:rank].sum(0).tolist()
    at = 0
    for e, shares in enumerate(placement.shares):
        start = -before[e]
        for slot, number in shares:
            lo, hi = max(start, 0), min(max(start + number, 0), mine[e])
            if lo < hi:
                slots[at + lo : at + hi] = slot
            start += number
        at += mine[e]
    return slots


def block_order(sizes: Tensor, order: Tensor) -> Tensor:
    """Positions of rows when blocks of `sizes` that lie one after another are laid out in another `order` (of blocks)."""
    starts = sizes.cumsum(0) - sizes
    lengths = sizes[order]
    ends = lengths.cumsum(0)
    shift = starts[order] - (ends - lengths)
    return torch.arange(int(ends[-1]) if ends.numel() else 0) + torch.repeat_interleave(shift, lengths)


def invert(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
