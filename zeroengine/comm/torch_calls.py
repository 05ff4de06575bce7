"""Which process group a blocking torch.distributed call of the user waits in, without looking into the call's frame."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

# Every backend counts these before it blocks. Others (sends, new_group, monitored_barrier) count otherwise or not at all.
_COLLECTIVES = frozenset(
    (
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_single",
        "reduce_scatter_tensor", "scatter", "scatter_object_list",
    )
)  # fmt: skip
OWN_GROUPS = "zeroengine "
"""How descriptions of the groups begin that this package made; its lanes say themselves where they wait."""


@dataclass(frozen=True)
class GroupCount:
    """Operations that this rank has issued on one group of the user, and the group's ranks (global)."""

    issued: int
    ranks: tuple[int, ...]


class CallWatch:
    """Told about every sample of the main thread in turn: a call that began since the last sample waits in the one group
    whose count went up meanwhile. Where several did, or the call is none that counts, the group stays unknown: a rank
    whose group is unknown passes for slow, never for diverged."""

    def __init__(self) -> None:
        self._counts: dict[str, GroupCount] = {}
        self._call: tuple[str, str] | None = None
        self._ranks: tuple[int, ...] | None = None

    def ranks(self, line: str, call: str | None, counts: dict[str, GroupCount]) -> tuple[int, ...] | None:
        """The ranks that `call`, made at `line`, needs; None: unknown, or no call."""
        moved = [c.ranks for n, c in counts.items() if c.issued != (self._counts[n].issued if n in self._counts else 0)]
        self._counts = counts
        before, self._call = self._call, None if call is None else (call, line)
        if call not in _COLLECTIVES:
            self._ranks = None
        elif moved:
            self._ranks = moved[0] if len(moved) == 1 else None
        elif before != self._call:
            self._ranks = None
        return self._ranks


def user_group_counts() -> dict[str, GroupCount]:
    """Counts of all groups but our own, by name."""
    world = dist.distributed_c10d._world
    found: dict[str, GroupCount] = {}
    for group in list(world.pg_map):
        try:
            if not group.group_desc.startswith(OWN_GROUPS):
                ranks = tuple(dist.get_process_group_ranks(group))
                found[group.group_name] = GroupCount(group._get_sequence_number_for_group(), ranks)  # type: ignore[attr-defined]
        except (KeyError, ValueError, RuntimeError):  # destroyed just now, or a backend that does not count
            continue
    return found
