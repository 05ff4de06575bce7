"""Makes the communicators of a process: groups, watches, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from zeroengine.comm.direct import DirectCommunicator
from zeroengine.comm.fingerprint import Fingerprint
from zeroengine.comm.health import process_monitor
from zeroengine.comm.lane import create_in_lane
from zeroengine.comm.listening import Listener
from zeroengine.comm.local import LocalCommunicator
from zeroengine.comm.shared import SharedTransport
from zeroengine.comm.shared_setup import SharedMemory
from zeroengine.comm.torch_calls import OWN_GROUPS
from zeroengine.comm.torch_comm import TorchCommunicator
from zeroengine.comm.two_level import TwoLevelTransport
from zeroengine.comm.watch import HealthWatch
from zeroengine.comm.wire import Wire
from zeroengine.errors import RankError

AnyCommunicator = TorchCommunicator | DirectCommunicator | LocalCommunicator

_GRACE_SECONDS = 60.0  # torch's own timeout comes after ours, whose message names the rank


class Fabric:
    """Communicators over the default process group (`init_distributed` first).

    `device` is where the data lives: CPU tensors travel through shared memory inside a host (with the native library;
    ZE_COMM=gloo forbids it) and over Gloo elsewhere, CUDA tensors over NCCL. `timeout`
    is the number of seconds in which a dead, stopped or diverged rank becomes an error; `stall_timeout` how long a rank may
    be busy in user code before it counts as lost.
    """

    def __init__(self, device: torch.device | str = "cpu", *, timeout: float = 10.0, stall_timeout: float = 600.0) -> None:
        if not dist.is_initialized():
            raise RankError("no process group: call zeroengine.init_distributed() first")
        if timeout <= 0 or stall_timeout < timeout:
            raise ValueError(f"comm timeouts must satisfy 0 < timeout ({timeout}) <= stall_timeout ({stall_timeout})")
        self.device = torch.device(device)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.timeout = timeout
        self.stall_timeout = stall_timeout
        self.simulated = dist.get_backend() == "fake"
        self._made: list[AnyCommunicator] = []
        self._stuck = False  # a thread may still use the peers' memory
        self._listeners: tuple[Listener, ...] = ()
        self._memory = SharedMemory(self.world_size)
        self._watch: HealthWatch | None = None
        if self.world_size > 1 and not self.simulated:
            self._watch = HealthWatch(process_monitor(min(1.0, timeout / 10)), timeout, stall_timeout)

    def communicator(self, name: str, ranks: Sequence[int] | None = None, *, control: bool = False) -> AnyCommunicator:
        """A new ordered stream over `ranks` (global, ascending; default: all). Collective over `ranks` only, so that a
        partition of the world into any number of groups costs each rank one group; ranks that share groups must make
        them in the same order. `control` asks for CPU tensors whatever the fabric's device.

        A name tells streams apart in errors and in the health of the peers: use it once among the groups of a rank.
        """
        members = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        self._check(name, members)
        made: AnyCommunicator
        if len(members) == 1:
            made = LocalCommunicator(name, self.rank)
        elif self.simulated:
            made = TorchCommunicator(name, Wire(self._new_group(name, members, "fake")), members, None, simulate=True)
        elif control or self.device.type == "cpu":
            wire, shared = self._watched_wire(name, members)
            made = TorchCommunicator(name, wire, members, self._watch, shared=shared)
        else:
            backend = dist.get_default_backend_for_device(self.device)
            made = DirectCommunicator(name, self._new_group(name, members, backend), members)
        self._made.append(made)
        self._tell(made)
        return made

    @property
    def communicators(self) -> tuple[AnyCommunicator, ...]:
        """Those that are open, in the order in which they were made."""
        return tuple(self._made)

    def listen(self, listener: Listener) -> None:
        """Every communicator of several ranks tells `listener` of what it moves, until `unlisten`. On this rank only."""
        self._hear((*self._listeners, listener))

    def unlisten(self, listener: Listener) -> None:
        self._hear(tuple(other for other in self._listeners if other is not listener))

    def _hear(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners
        for made in self._made:
            self._tell(made)

    def _tell(self, made: AnyCommunicator) -> None:
        if not isinstance(made, LocalCommunicator):
            made.listeners = self._listeners

    def close(self) -> None:
        """Closes every communicator that is still open. Collective."""
        while self._made:
            made = self._made.pop()
            made.close()
            self._stuck = self._stuck or getattr(made, "stuck", False)
        if not self._stuck:
            self._memory.close()

    def shared_bytes(self) -> int:
        """Bytes of memory shared with peers that this rank holds: buffers, those kept for reuse, and staging areas."""
        return self._memory.bytes()

    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent since `forget_sent`, by "communicator.operation"."""
        return self._counts("bytes")

    def calls(self) -> dict[str, int]:
        """Operations between ranks since `forget_sent`, by "communicator.operation"."""
        return self._counts("calls")

    def forget_sent(self) -> None:
        for made in self._made:
            made.traffic.reset()

    def _counts(self, what: str) -> dict[str, int]:
        found = {f"{m.name}.{kind}": int(n) for m in self._made if m.size > 1 for kind, n in getattr(m.traffic, what).items()}
        return {name: n for name, n in found.items() if n}

    def _check(self, name: str, members: tuple[int, ...]) -> None:
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} asks for communicator {name!r} of ranks {members}, which it is not in")
        if list(members) != sorted(set(members)) or members[0] < 0 or members[-1] >= self.world_size:
            raise ValueError(f"communicator {name!r}: ranks {members} are not ascending within 0..{self.world_size - 1}")
        if any(made.name == name for made in self._made):
            raise ValueError(f"communicator {name!r} exists; streams of one fabric need different names")

    def _watched_wire(self, name: str, members: tuple[int, ...]) -> tuple[Wire, SharedTransport | TwoLevelTransport | None]:
        """Connecting waits for every member: in a lane, so that one that never comes is named."""
        if self._watch is None:
            raise RankError(f"communicator {name!r}: no monitor for a group of {len(members)} ranks")

        def make() -> tuple[Wire, SharedTransport | TwoLevelTransport | None]:
            group = self._new_group(name, members, "gloo")
            if len(members) < self.world_size:
                _forget_addresses(group)
            wire, connect = Wire(group), partial(self._between_hosts, name)
            shared = self._memory.transport(name, wire, members, members.index(self.rank), connect)
            if isinstance(shared, SharedTransport) and shared.carries_messages:
                # nothing goes over Gloo any more, and the thread of each group would wake up a hundred times a second
                shared.announce(Fingerprint("new_group", name, 0, torch.uint8), 0)
                shared.finish()  # a meeting: all have read what came over it
                wire.close()
            return wire, shared

        try:
            return create_in_lane(name, tuple(r for r in members if r != self.rank), self._watch, make)
        except BaseException:
            self._stuck = True  # the lane's thread may wait in the peers' memory for one that does not come
            raise

    def _between_hosts(self, name: str, members: tuple[int, ...]) -> Wire:
        group = self._new_group(f"{name} between hosts", members, "gloo")
        _forget_addresses(group)
        wire = Wire(group)
        wire.barrier()
        return wire

    def _new_group(self, name: str, members: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        make = partial(
            dist.new_group,
            list(members),
            timeout=timedelta(seconds=self.stall_timeout + _GRACE_SECONDS),
            backend=backend,
            group_desc=f"{OWN_GROUPS}{name}",
        )
        # only the members meet; the whole world needs no such exception to torch's rule that all ranks make all groups
        return make() if len(members) == self.world_size else make(use_local_synchronization=True)


def _forget_addresses(group: dist.ProcessGroup) -> None:
    """Takes this rank's address out of the store where the members of a Gloo group have met, once all have connected. Collective;
    another operation of the group must follow before any of its ranks makes a group.

    torch names a group of some ranks after them and the number of groups that there are. A later group of the same ranks can
    so get the name of one that has ended, and would connect to the addresses that it finds under it.
    """
    dist.barrier(group=group)
    _, store = dist.distributed_c10d._world.pg_map[group]
    store.delete_key(f"cpu//0/{dist.get_rank(group)}")
