"""Tokens to the ranks of their experts and back.

Rows are sorted by expert, sent in uneven blocks, and sorted by expert again where they arrive. With two hops a row goes first to
the rank of its own node that has the target's place in its node, and from there to the target's node: a rank then talks
to the other nodes by one message each, whatever the number of ranks on them (Rajbhandari et al., "DeepSpeed-MoE", 2022,
section 5.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.moe.collectives import Movement, complete, issue, permute, place, spread
from zeroengine.moe.group import ExpertGroup
from zeroengine.moe.plan import Placement, block_order, invert, place_experts, slot_counts, slots_of


@dataclass(frozen=True)
class Order:
    """A permutation of rows and its inverse, on the rows' device. One that `moves` nothing costs nothing."""

    forward: Tensor
    inverse: Tensor
    moves: bool = True

    @staticmethod
    def of(order: Tensor, device: torch.device, moves: bool = True) -> Order:
        order = order.to(device)
        return Order(order, invert(order), moves)

    def apply(self, rows: Tensor) -> Tensor:
        return permute(rows, self.forward, self.inverse) if self.moves else rows

    def undo(self, rows: Tensor) -> Tensor:
        return permute(rows, self.inverse, self.forward) if self.moves else rows


@dataclass(frozen=True)
class Hop:
    """Rows are reordered and then exchanged within `group.hops` or the whole group."""

    order: Order | None
    sends: list[int]
    receives: list[int]


@dataclass(frozen=True)
class Route:
    """The way of T tokens with k assignments each. `order`: assignments (token * k + choice) in the order they leave;
    `counts`: rows of each of this rank's slots, in order; `arrived`: permutation of what arrives to the order of slots;
    `placement`: who computes what; `load`: assignments of each expert, of all ranks of the group."""

    tokens: int
    k: int
    order: Tensor
    hops: tuple[Hop, ...]
    arrived: Order
    counts: list[int]
    placement: Placement
    load: Tensor


class Flight:
    """Tokens under way. `land` gives the rows of this rank's slots, [N, H], in order of slots."""

    def __init__(self, dispatcher: Dispatcher, tokens: Tensor, route: Route) -> None:
        self._route = route
        rows = spread(tokens, route.order, route.k)
        self._movements = dispatcher.movements(route)
        self._rest = self._movements[1:]
        first = route.hops[0].order
        self._flying = issue(rows if first is None else first.apply(rows), self._movements[0])

    def land(self) -> Tensor:
        rows = complete(self._flying, self._movements[0])
        for movement, hop in zip(self._rest, self._route.hops[1:], strict=True):
            rows = complete(issue(rows if hop.order is None else hop.order.apply(rows), movement), movement)
        return self._route.arrived.apply(rows)


class Dispatcher:
    """Moves the tokens of one layer. Collective over the group; `subject` names the layer in errors."""

    def __init__(self, group: ExpertGroup, num_experts: int, subject: str) -> None:
        self.group, self.num_experts, self.subject = group, num_experts, subject

    def route(self, index: Tensor, keep: Tensor | None = None) -> Route:
        """Plans the way of tokens whose experts are `index` [T, k] (those of `keep` [T, k], if given)."""
        group, (tokens, k) = self.group, index.shape
        flat = index.reshape(-1)
        if keep is None:
            order = torch.argsort(flat, stable=True)
        else:
            kept = keep.reshape(-1).nonzero().view(-1)
            order = kept[torch.argsort(flat[kept], stable=True)]
        experts = flat[order]
        mine = torch.bincount(experts, minlength=self.num_experts).cpu()
        counts = group.control.exchange(mine, f"{self.subject}: tokens of each expert")
        load = counts.sum(0)
        placement = place_experts(load.tolist(), group)
        slots = slots_of(experts, counts, placement, group.rank)
        if placement.copied:
            again = torch.argsort(slots, stable=True)
            order = order[again]
        table = slot_counts(counts, placement)
        hops, arrived = self._hops(table, placement, index.device)
        begin = placement.first[group.rank]
        here = table[:, begin : begin + len(placement.slots[group.rank])]
        return Route(tokens, k, order, hops, arrived, here.sum(0).tolist(), placement, load)

    def _hops(self, table: Tensor, placement: Placement, device: torch.device) -> tuple[tuple[Hop, ...], Order]:
        """`table` [ranks, slots]: rows of each rank for each slot."""
        group = self.group
        begin, size = placement.first[group.rank], len(placement.slots[group.rank])
        here = table[:, begin : begin + size]  # [source, slot]
        blocks = torch.arange(group.size * size).view(group.size, size).T.reshape(-1)
        arrived = Order.of(block_order(here.reshape(-1), blocks), device, moves=group.size > 1)
        bounds = list(placement.first) + [placement.number]
        between = torch.stack([table[:, a:b].sum(1) for a, b in zip(bounds, bounds[1:], strict=False)], 1)  # [source, target]
        if group.hops is None:
            return (Hop(None, between[group.rank].tolist(), between[:, group.rank].tolist()),), arrived
        nodes, local = group.hops.between.size, group.hops.inside.size
        node, at = divmod(group.rank, local)
        grid = between.view(nodes, local, nodes, local)  # source node and place, target node and place
        leave = torch.arange(group.size).view(nodes, local).T.reshape(-1)
        first = Hop(
            Order.of(block_order(between[group.rank], leave), device),
            grid[node, at].sum(0).tolist(), grid[node, :, :, at].sum(1).tolist(),
        )  # fmt: skip
        held = grid[node, :, :, at]  # after the first hop: [source place, target node]
        swap = torch.arange(local * nodes).view(local, nodes).T.reshape(-1)
        second = Hop(
            Order.of(block_order(held.reshape(-1), swap), device),
            held.sum(0).tolist(), grid[:, :, node, at].sum(1).tolist(),
        )  # fmt: skip
        return (first, second), arrived

    @property
    def _comms(self) -> list[Communicator]:
        """One for each hop."""
        hops = self.group.hops
        return [self.group.tokens] if hops is None else [hops.inside, hops.between]

    def movements(self, route: Route) -> list[Movement]:
        wire, back = self.group.wire, self.group.wire
        if back == "fp8":
            back = "bf16"
        return [
            Movement(c, hop.sends, hop.receives, f"{self.subject}: tokens to experts", wire, back)
            for c, hop in zip(self._comms, route.hops, strict=True)
        ]

    def send(self, tokens: Tensor, route: Route) -> Flight:
        """Starts to move `tokens` [T, H]."""
        return Flight(self, tokens, route)

    def combine(self, rows: Tensor, route: Route, weights: Tensor) -> Tensor:
        """Brings the experts' outputs `rows` [N, H] back and adds each token's, weighted by `weights` [T, k]. Assignments that
        were dropped add nothing. Returns [T, H] in the type of `rows`."""
        wire = self.group.wire if self.group.wire == "same" else "bf16"
        rows = route.arrived.undo(rows)
        for comm, hop in reversed(list(zip(self._comms, route.hops, strict=True))):
            movement = Movement(comm, hop.receives, hop.sends, f"{self.subject}: tokens from experts", wire, wire)
            rows = complete(issue(rows, movement), movement)
            if hop.order is not None:
                rows = hop.order.undo(rows)
        wide = torch.promote_types(rows.dtype, weights.dtype)
        chosen = place(rows, route.order, route.tokens * route.k).view(route.tokens, route.k, rows.shape[1]).to(wide)
        return torch.bmm(weights.to(wide).unsqueeze(1), chosen).squeeze(1).to(rows.dtype)
