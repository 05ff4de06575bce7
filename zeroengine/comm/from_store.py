"""A communicator between processes that meet in a store, for which no process group exists yet."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from zeroengine.comm.fingerprint import name_ranks
from zeroengine.comm.lane import Lane, Operation, Watch, create_in_lane
from zeroengine.comm.shared import SharedTransport
from zeroengine.comm.shared_setup import SharedMemory
from zeroengine.comm.torch_comm import TorchCommunicator
from zeroengine.comm.two_level import TwoLevelTransport
from zeroengine.comm.wire import Wire, wire_from_store
from zeroengine.errors import RankError

_LINGER_SECONDS = 1.0


def communicator_from_store(
    name: str, store: dist.Store, ranks: tuple[int, ...], rank: int, watch: Watch, memory: SharedMemory, timeout: timedelta
) -> TorchCommunicator:
    """A new ordered stream between `ranks` (global), of which this process is the one in place `rank`; `store` is the group's own.
    Collective; `watch` names ranks that do not come. `timeout` is Gloo's.

    Messages go through shared memory if all ranks have that in common: then a receive from any rank has one place to look.
    """

    def between_hosts(members: tuple[int, ...]) -> Wire:
        return wire_from_store(dist.PrefixStore(f"between hosts, {members[0]}", store), members.index(ranks[rank]), len(members), timeout)

    def make() -> tuple[Wire, SharedTransport | TwoLevelTransport | None]:
        wire = wire_from_store(store, rank, len(ranks), timeout)
        return wire, memory.transport(name, wire, ranks, rank, between_hosts) if len(ranks) > 1 else None

    wire, shared = create_in_lane(name, tuple(r for i, r in enumerate(ranks) if i != rank), watch, make)
    return TorchCommunicator(name, wire, ranks, watch, shared=shared, channels=isinstance(shared, SharedTransport))


def await_ranks(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Returns when all of `size` ranks have called this; until then one of them may still be starting, and is not missing.

    Raises RankError with those that have not come within `timeout`.
    """
    keys = [f"here/{r}" for r in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timeout)
    except Exception as error:  # of several classes, by the kind of store
        raise RankError(f"rank {rank}: {_who_is_missing(store, keys)} within {timeout.total_seconds():g} s") from error


def _who_is_missing(store: dist.Store, keys: list[str]) -> str:
    try:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
    except Exception as error:  # its keeper has given up a moment earlier
        return f"not all of {len(keys)} ranks came to the start of torch.distributed, and the store is gone ({error})"
    time.sleep(_LINGER_SECONDS)  # this may be the process that keeps the store: others are about to look
    return (
        f"{name_ranks(missing)} of {len(keys)} did not come to the start of torch.distributed (look at the output of what was to "
        "start there)"
    )


class Alone:
    """The watch of a process that waits for nobody but itself."""

    def watch(self, lane: Lane) -> None:
        return

    def unwatch(self, lane: Lane) -> None:
        return

    def until(self, operation: Operation) -> None:
        while not operation.finished_within(60.0):
            pass

    def explain(self, lane: Lane, what: str, error: Exception) -> Exception:
        return error
