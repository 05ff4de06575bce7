"""The update of parameters that an optimizer must see whole, where each rank keeps a slice of gradients and masters.

Each such parameter has an owner, one rank of the shard group. The owner gets the other ranks' slices of the reduced
gradient and of the master (two all-to-alls), steps the torch optimizer on the real shape, and sends the new values back
to the slices (a third). Only the owner has optimizer state, so that state is sharded as for any other optimizer; masters,
published values and checkpoints of masters are those of the slices and know nothing of owners.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zeroengine.comm.protocol import Communicator
from zeroengine.offload.home import Home, Memory, at_hand, stub
from zeroengine.offload.placement import Placement
from zeroengine.optim.update import FlatMaster
from zeroengine.zero.experts import is_stack, mark_stack
from zeroengine.zero.layout import ParamSpec


@dataclass(frozen=True)
class Cut:
    """Elements [start, end) of a parameter lie in the slice of group rank `rank`, at `at` of that slice."""

    rank: int
    start: int
    end: int
    at: int


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter. `view` has its shape, and values only while its owner updates it; None on other ranks. `home`: of the
    state that the owner keeps."""

    master: FlatMaster
    spec: ParamSpec
    owner: int
    cuts: tuple[Cut, ...]
    view: nn.Parameter | None
    home: Home

    @property
    def values_whole(self) -> bool:
        """The owner has all master values already: they are the values, and those are kept whole."""
        return not self.master.separate and not self.master.bucket.policy.shard_params

    def hide(self) -> None:
        if self.view is not None:
            self.view.grad = None
            self.view.data = stub(self.spec.shape, self.master.flat.dtype, self.master.flat.device)


Range = Callable[[Member, Cut], Tensor]


class WholeUpdate:
    """Owners of the whole parameters of one engine, and their update. `at_once` steps all of them by one call, for an
    optimizer that counts its calls. Else there are rounds, in which an owner takes parameters of `round_size` elements
    together, or one larger parameter: its temporary memory is a gradient and a master of that size."""

    def __init__(self, at_once: bool, round_size: int) -> None:
        self._at_once = at_once
        self._round_size = round_size
        self._loads: dict[Communicator, list[int]] = {}
        self._members: dict[tuple[int, int], Member] = {}
        self._rounds: list[list[Member]] = []

    def add(self, entries: Sequence[tuple[FlatMaster, int]]) -> None:
        """Gives every parameter (master of its bucket, index there) an owner: the largest first, each to the rank with
        the fewest elements so far. The same on every rank. Owners of earlier parameters stay."""
        ordered = sorted(entries, key=lambda e: (-e[0].bucket.layout.specs[e[1]].numel, e[0].bucket.index, e[1]))
        for master, index in ordered:
            spec = master.bucket.layout.specs[index]
            comm = master.bucket.comm
            loads = self._loads.setdefault(comm, [0] * comm.size)
            owner = min(range(comm.size), key=lambda r: (loads[r], r))
            loads[owner] += spec.numel
            view: nn.Parameter | None = None
            home: Home = Memory()
            if owner == comm.rank:
                view = nn.Parameter(stub(spec.shape, master.flat.dtype, master.flat.device))
                mark_stack(view, is_stack(master.bucket.params[index]))
                home = master.bucket.placement.more_state(f"optimizer state of {spec.name}", tuple)
            member = Member(master, spec, owner, tuple(_cuts(master, spec)), view, home)
            self._members[master.bucket.index, index] = member
        self._rounds = list(self._in_rounds())

    def view(self, bucket: int, index: int) -> nn.Parameter | None:
        """What the optimizer updates for a parameter, None on ranks that do not own it. KeyError if it is not whole."""
        return self._members[bucket, index].view

    def holds(self, bucket: int, index: int) -> bool:
        return (bucket, index) in self._members

    def owned(self) -> Iterator[tuple[nn.Parameter, ParamSpec]]:
        """The parameters that this rank updates."""
        for member in self._members.values():
            if member.view is not None:
                yield member.view, member.spec

    def owns_state(self, state: Callable[[nn.Parameter], Iterable[Tensor]]) -> None:
        """`state` gives what the optimizer keeps for a parameter that this rank owns: where it lives, the placement says."""
        for member in self._members.values():
            if member.view is not None:
                member.home.owns(partial(state, member.view))

    def _in_rounds(self) -> Iterator[list[Member]]:
        if self._at_once:
            yield list(self._members.values())
            return
        waiting: dict[tuple[Communicator, int], list[Member]] = {}
        for key in sorted(self._members):
            member = self._members[key]
            waiting.setdefault((member.master.bucket.comm, member.owner), []).append(member)
        while any(waiting.values()):
            members: list[Member] = []
            for queue in waiting.values():
                taken = 0
                while queue and (not taken or taken + queue[0].spec.numel <= self._round_size):
                    taken += queue[0].spec.numel
                    members.append(queue.pop(0))
            yield members

    # --- the update -----------------------------------------------------------------------------------------------

    def update(self, step: Callable[[], object], used: frozenset[str]) -> None:
        """Brings gradients and masters to their owners, calls `step`, brings the new masters back. Collective. Parameters
        that are not in `used` have no gradient, as in torch."""
        for members in self._rounds:
            present = [m for m in members if m.spec.name in used]
            if present:
                self._at_hand(present, partial(self._round, present, step))
            elif self._at_once:
                step()

    def _at_hand(self, members: list[Member], act: Callable[[], None]) -> None:
        """Calls `act` while masters and state of `members` are in memory; not if the disk of a rank fails, which is kept for
        `Placement.agree`."""
        placement = members[0].master.bucket.placement
        if not placement.uses_disk:
            act()
            return
        masters = {id(m.master): m.master for m in members}
        with contextlib.ExitStack() as whatever_happens:
            stack = contextlib.ExitStack()
            whatever_happens.callback(_close, stack, placement)
            with placement.faults.kept():
                for master in masters.values():
                    stack.enter_context(master.at_hand(changed=True))
                stack.enter_context(at_hand(*(m.home for m in members), changed=True))
            failed = torch.tensor([int(placement.faults.first is not None)])
            for comm in {id(m.master.bucket.comm): m.master.bucket.comm for m in members}.values():
                comm.all_reduce(failed, "state of whole parameters at hand", op="max").wait()
            if not int(failed):
                act()

    def _round(self, members: list[Member], step: Callable[[], object]) -> None:
        mine = [m for m in members if m.view is not None]
        grads = {m: _empty(m, m.master.gradients.rule.accumulate) for m in mine}
        self._to_owners(members, lambda m: m.master.gradients.reduced, grads, "gradients")
        masters = {m: _whole_values(m) if m.values_whole else _empty(m, m.master.flat.dtype) for m in mine}
        self._to_owners([m for m in members if not m.values_whole], lambda m: m.master.flat, masters, "masters")
        for m in mine:
            if m.view is not None:
                m.view.data = masters[m].view(m.spec.shape)
                m.view.grad = grads.pop(m).to(m.master.flat.dtype).view(m.spec.shape)
        step()
        for m in mine:
            m.hide()

        def new(m: Member, cut: Cut) -> Tensor:
            return masters[m][cut.start : cut.end]

        def place(m: Member, cut: Cut) -> Tensor:
            return m.master.flat[cut.at : cut.at + cut.end - cut.start]

        self._move(members, new, place, "new values", to_owner=False)

    def _to_owners(self, members: list[Member], flat: Callable[[Member], Tensor], whole: dict[Member, Tensor], what: str) -> None:
        def part(m: Member, cut: Cut) -> Tensor:
            return flat(m)[cut.at : cut.at + cut.end - cut.start]

        def place(m: Member, cut: Cut) -> Tensor:
            return whole[m][cut.start : cut.end]

        self._move(members, part, place, what, to_owner=True)

    def _move(self, members: list[Member], source: Range, target: Range, what: str, *, to_owner: bool) -> None:
        """One all-to-all for each group of ranks and dtype: cuts go from the ranks of their slices to the owners, or the other
        way."""
        for (comm, dtype), alike in _alike(members, gradients=what == "gradients").items():
            sent: list[list[Tensor]] = [[] for _ in range(comm.size)]
            places: list[list[Tensor]] = [[] for _ in range(comm.size)]
            for m in alike:
                for cut in m.cuts:
                    here, there = (cut.rank, m.owner) if to_owner else (m.owner, cut.rank)
                    if here == comm.rank:
                        sent[there].append(source(m, cut))
                    if there == comm.rank:
                        places[here].append(target(m, cut))
            device = alike[0].master.flat.device
            outgoing = [t for row in sent for t in row]
            data = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=dtype, device=device)
            receives = [sum(t.numel() for t in row) for row in places]
            received = torch.empty(sum(receives), dtype=dtype, device=device)
            subject = f"{what} of whole parameters {alike[0].spec.name} ({len(alike)} parameters)"
            sends = [sum(t.numel() for t in row) for row in sent]
            comm.all_to_all(received, data, subject, output_splits=receives, input_splits=sends).wait()
            at = 0
            for place in (t for row in places for t in row):
                place.copy_(received[at : at + place.numel()])
                at += place.numel()

    def rehearse(self, step: Callable[[], object], wants: Callable[[nn.Parameter], bool]) -> None:
        """Calls `step` on zeros with zero gradients in place of the owned parameters that `wants` chooses, for an optimizer
        to make its state. No communication."""
        for members in self._rounds:
            chosen = [m.view for m in members if m.view is not None and wants(m.view)]
            for view in chosen:
                view.data = torch.zeros(view.shape, dtype=view.dtype, device=view.device)
                view.grad = torch.zeros_like(view)
            homes = [m.home for m in members if m.view is not None and wants(m.view)]
            if chosen or self._at_once:
                with at_hand(*homes, changed=True):
                    step()
            for m in members:
                m.hide()


def _close(stack: contextlib.ExitStack, placement: Placement) -> None:
    with placement.faults.kept():
        stack.close()


def _cuts(master: FlatMaster, spec: ParamSpec) -> Iterator[Cut]:
    size = master.bucket.layout.shard_numel
    for rank in range(spec.offset // size, (spec.end - 1) // size + 1):
        lo, hi = max(spec.offset, rank * size), min(spec.end, (rank + 1) * size)
        yield Cut(rank, lo - spec.offset, hi - spec.offset, lo - rank * size)


def _empty(m: Member, dtype: torch.dtype) -> Tensor:
    return torch.empty(m.spec.numel, dtype=dtype, device=m.master.flat.device)


def _whole_values(m: Member) -> Tensor:
    """The owner's own copy of the values, updated in place: publishing writes every rank's copy afterwards."""
    full = m.master.bucket.full
    if full is None:
        raise RuntimeError(f"the values of {m.spec.name} are not whole")
    return full[m.spec.offset : m.spec.end]


def _alike(members: list[Member], *, gradients: bool) -> dict[tuple[Communicator, torch.dtype], list[Member]]:
    found: dict[tuple[Communicator, torch.dtype], list[Member]] = {}
    for m in members:
        dtype = m.master.gradients.rule.accumulate if gradients else m.master.flat.dtype
        found.setdefault((m.master.bucket.comm, dtype), []).append(m)
    return found
