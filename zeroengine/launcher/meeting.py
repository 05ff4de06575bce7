"""How the torch agents of an attempt's hosts meet: a c10d store on the first host, places given by the launcher.

torch's own c10d rendezvous lets agents come as they like, orders them by the text of their address and waits tens of
seconds for more. Here the launcher knows the hosts, so their order is that of the hostfile and nobody is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "zerorun"
_WAIT = timedelta(minutes=5)  # for an agent that is late; the launcher ends the attempt long before where one is lost


@dataclass
class Meeting(RendezvousHandler):
    """Membership of one attempt. Ranks meet in the same store, under another prefix."""

    run_id: str
    address: str
    port: int
    index: int
    nodes: int

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = TCPStore(self.address, self.port, is_master=False, timeout=_WAIT, wait_for_workers=False)
        where = RendezvousStoreInfo(self.address, self.port)
        return RendezvousInfo(PrefixStore(f"zerorun/{self.run_id}", store), self.index, self.nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody can join in any case."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    address, _, port = parameters.endpoint.rpartition(":")
    index = int(parameters.get("index"))
    return Meeting(parameters.run_id, address, int(port), index, parameters.max_nodes)


def register() -> None:
    """Makes the backend known to torch, by its public registry."""
    rendezvous_handler_registry.register(BACKEND, _create)


def serve(port: int) -> TCPStore:
    """The store of an attempt; `port` 0 takes a free one and keeps it, so that nobody can come in between."""
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
