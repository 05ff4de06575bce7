"""Blocking movement of CPU tensors over one process group of torch, whether torch's registry knows the group or not.

A group that is made from a store alone is in no registry, and the functions of `torch.distributed` take only groups that
are; the methods of the group itself take both.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_Group: Any = dist.ProcessGroup
_all_gather: Any = getattr(_Group, "all_gather_single", None) or _Group._allgather_base  # names changed between releases
_all_to_all: Any = getattr(_Group, "all_to_all_single", None) or _Group.alltoall_base


class Wire:
    """What transports ask of a process group. Peers are ranks of the group. Not thread-safe but for sends and receives."""

    def __init__(self, group: dist.ProcessGroup, *, registered: bool = True) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._registered = registered
        self._group: Any = group

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        _all_gather(self._group, output, input).wait()

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def all_to_all(self, output: Tensor, input: Tensor, receives: Sequence[int] = (), sends: Sequence[int] = ()) -> None:
        """Equal blocks, or blocks of these numbers of elements by rank."""
        _all_to_all(self._group, output, input, list(receives), list(sends)).wait()

    def all_reduce_sparse(self, tensor: Tensor) -> None:
        """Sum of sparse tensors of one shape."""
        self._group.allreduce([tensor]).wait()

    def send(self, tensor: Tensor, dst: int, tag: int) -> Any:
        """Returns at once, with torch's handle."""
        return self._group.send([tensor], dst, tag)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Any:
        return self._group.recv([tensor], src, tag)

    def receive_from_any(self, tensor: Tensor, tag: int) -> int:
        """Blocks; the rank that has sent."""
        work = self._group.recv_anysource([tensor], tag)
        work.wait()
        return int(work._source_rank())

    def barrier(self) -> None:
        self._group.barrier().wait()

    def close(self) -> None:
        """Ends the group: its threads and sockets go now, if nothing else refers to it."""
        group, self._group = self._group, None
        if group is not None and self._registered:
            dist.destroy_process_group(group)


def wire_from_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Wire:
    """A Gloo group of the processes that meet in `store`, which is the group's own. Collective, and blocks until all have
    come; another operation of all of them must follow before any makes a group from the same store again."""
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    wire = Wire(group, registered=False)
    wire.barrier()
    store.delete_key(f"0/{rank}")  # where this rank listens: a later group must not connect to it
    return wire
