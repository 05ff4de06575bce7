"""Which assignments an expert takes when it can take only so many. Decided over the global batch: what is kept does not depend
on how the batch is cut into ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator

Priority = Literal["position", "score", "random"]


@dataclass(frozen=True)
class Capacity:
    """An expert takes max(`minimum`, ceil(factor * k * tokens / experts)) assignments of the global batch, with `train` or
    `evaluation` as factor. Where there are more, those that come first are kept ("position": all first choices in the order of
    tokens, then all second ones, ...), those with the largest weights ("score"), or any ("random")."""

    train: float = 1.0
    evaluation: float = 1.0
    minimum: int = 4
    priority: Priority = "position"

    def of(self, tokens: int, k: int, experts: int, training: bool) -> int:
        factor = self.train if training else self.evaluation
        return max(self.minimum, math.ceil(factor * k * tokens / experts))


def kept(index: Tensor, weights: Tensor, experts: int, capacity: Capacity, training: bool, peers: Communicator, subject: str) -> Tensor:
    """Mask [T, k] of the assignments that are kept. `index`, `weights` [T, k]. Collective over `peers` (control)."""
    tokens, k = index.shape
    counts = torch.stack([torch.bincount(choice, minlength=experts) for choice in index.unbind(1)]).cpu()  # [k, E]
    seed = torch.randint(1 << 30, (1,)) if capacity.priority == "random" else torch.zeros(1, dtype=torch.int64)
    table = peers.exchange(torch.cat([torch.tensor([tokens]), seed, counts.view(-1)]), f"{subject}: choices of the ranks")
    limit = capacity.of(int(table[:, 0].sum()), k, experts, training)
    every = table[:, 2:].view(-1, k, experts)
    if int(every.sum((0, 1)).max()) <= limit:
        return torch.ones_like(index, dtype=torch.bool)
    if capacity.priority == "position":
        before = _before(every, peers.rank).to(index.device)
        return _positions(index, experts) + before.gather(1, index.T).T < limit
    first = int(table[: peers.rank, 0].sum())
    numbers = (torch.arange(tokens, device=index.device) + first)[:, None] * k + torch.arange(k, device=index.device)
    keys = weights.float() if capacity.priority == "score" else _random(numbers, int(table[0, 1]))
    return _best(index, keys, numbers, experts, limit, table[:, 0].tolist(), peers, subject)


def _before(every: Tensor, rank: int) -> Tensor:
    """[k, E]: how many assignments come before the first of this rank, by choice and expert: earlier choices of all ranks,
    and the same choice of earlier ranks. `every` [ranks, k, E]."""
    of_all = every.sum(0)
    return of_all.cumsum(0) - of_all + every[:rank].sum(0)


def _positions(index: Tensor, experts: int) -> Tensor:
    """[T, k]: place of each assignment among those of this rank with the same choice and expert."""
    one_hot = torch.zeros(*index.shape, experts, dtype=torch.int32, device=index.device).scatter_(2, index.unsqueeze(2), 1)
    return (one_hot.cumsum(0) - one_hot).gather(2, index.unsqueeze(2)).squeeze(2)


def _random(numbers: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each assignment, from its number in the global batch and a seed (a multiplicative hash)."""
    x = (numbers + seed) & 0xFFFFFFFF
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    x = (x >> 16) ^ x
    return (x >> 8).float() / (1 << 24)


def _best(
    index: Tensor, keys: Tensor, numbers: Tensor, experts: int, limit: int, tokens: list[int], peers: Communicator, subject: str
) -> Tensor:
    """Keeps the `limit` assignments of each expert with the largest keys, of equal ones the first."""
    k = index.shape[1]
    longest = max(tokens) * k
    mine = torch.zeros(2, longest, dtype=torch.float64)
    mine[0, : index.numel()] = index.reshape(-1).cpu()
    mine[1, : index.numel()] = keys.reshape(-1).cpu()
    table = peers.exchange(mine, f"{subject}: keys of the choices").view(-1, 2, longest)
    parts = [table[r, :, : t * k] for r, t in enumerate(tokens)]
    whole = torch.cat(parts, 1)
    owner, key = whole[0].long(), whole[1]
    order = torch.argsort(key, descending=True, stable=True)
    order = order[torch.argsort(owner[order], stable=True)]
    counts = torch.bincount(owner, minlength=experts)
    place = torch.arange(order.numel()) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    keep = torch.zeros(order.numel(), dtype=torch.bool)
    keep[order[place < limit]] = True
    return keep[numbers.reshape(-1).cpu()].view(index.shape).to(index.device)
