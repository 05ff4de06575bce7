"""The ranks that hold the same parameters: the values of one go to all, and those of all are compared."""

from __future__ import annotations

from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ModelError


class Holders:
    """`params` joins the ranks that have a slice each, `replicas` those that have the same slice. `ranks`: all of them, global and
    ascending. Ranks with other parts of a tensor-parallel parameter, other experts or another stage are none of them."""

    def __init__(self, params: Communicator, replicas: Communicator) -> None:
        self.params, self._replicas = params, replicas
        me = params.ranks[params.rank]
        # along a dimension of the mesh the distance from rank to rank is the same everywhere
        self.ranks = tuple(first + rank - me for first in replicas.ranks for rank in params.ranks)

    def broadcast(self, flat: Tensor, subject: str, source: int | None = None) -> None:
        """`flat` of the global rank `source` becomes everybody's; without it, that of the first of `ranks`. Collective."""
        replica, place = divmod(0 if source is None else self.ranks.index(source), self.params.size)
        self.params.broadcast(flat, place, subject).wait()
        self._replicas.broadcast(flat, replica, subject).wait()

    def exchange(self, values: Tensor, subject: str) -> Tensor:
        """As `Communicator.exchange`: one row for each of `ranks`."""
        rows = self.params.exchange(values, subject)
        return self._replicas.exchange(rows.flatten(), subject).view(len(self.ranks), -1)

    def check_modifier(self, rank: int | None, name: str) -> None:
        """Raises `ModelError` if the values of parameter `name` are to be those of a `rank` that does not hold it."""
        if rank is not None and rank not in self.ranks:
            raise ModelError(
                f"rank {self.params.ranks[self.params.rank]}: modifier_rank {rank} does not hold parameter '{name}' as it is here, "
                f"ranks {list(self.ranks)} do (others have other parts, experts or stages); name one of these, or leave modifier_rank "
                "out and make the same edit on all of them"
            )
