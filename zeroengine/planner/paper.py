"""A rank of a job that does not exist: communicators that count what would be sent and move nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.comm import checks
from zeroengine.comm.fabric import AnyCommunicator, Fabric
from zeroengine.comm.local import Finished, LocalCommunicator
from zeroengine.comm.protocol import ReduceOp, Work
from zeroengine.config import Config
from zeroengine.engine.initialize import mesh_degrees
from zeroengine.mesh import Mesh


class PaperCommunicator(LocalCommunicator):
    """A group whose other ranks are not there. Operations are checked and counted as those of real ones, and change nothing; tensors
    may be of the meta device or fake. What other ranks would answer in an exchange of control values is what this one says."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(name, rank)
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)

    def all_gather(self, full: Tensor, shard: Tensor, subject: str) -> Work:
        checks.check_gather(self.name, self.size, full, shard, subject)
        return self._count("all_gather", checks.sent_share(full.nbytes, self.size))

    def reduce_scatter(self, shard: Tensor, full: Tensor, subject: str, *, scale: float = 1.0, accumulate: bool = False) -> Work:
        checks.check_reduce_scatter(self.name, self.size, shard, full, scale, subject)
        return self._count("reduce_scatter", checks.sent_share(full.nbytes, self.size))

    def all_reduce(self, tensor: Tensor, subject: str, *, op: ReduceOp = "sum", scale: float = 1.0) -> Work:
        checks.flat(self.name, subject, tensor)
        checks.check_scale(self.name, tensor, scale, subject, op)
        return self._count("all_reduce", checks.all_reduce_share(tensor, self.size))

    def broadcast(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.flat(self.name, subject, tensor)
        return self._count("broadcast", checks.sent_share(tensor.nbytes, self.size))

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        subject: str,
        *,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        checks.check_all_to_all(self.name, self.size, output, input, subject, output_splits, input_splits)
        return self._count("all_to_all", checks.all_to_all_share(input, input_splits, self.rank, self.size))

    def send(self, tensor: Tensor, dst: int, subject: str) -> Work:
        checks.check_peer(self.name, self.size, self.rank, dst, subject)
        return self._count("send", tensor.nbytes)

    def recv(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.check_peer(self.name, self.size, self.rank, src, subject)
        return self._count("recv", 0)

    def exchange(self, values: Tensor, subject: str) -> Tensor:
        self._count("exchange", checks.exchange_share(values, self.size))
        return values.detach().reshape(1, -1).expand(self.size, -1).clone()

    def _count(self, kind: str, sent: int) -> Work:
        self.traffic.count(kind, sent)
        return Finished()


class PaperFabric(Fabric):
    """Makes the communicators of `rank` in a job of `world_size` ranks, without any process group. Its device is meta."""

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "meta") -> None:
        self.device = torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.simulated = True
        self._made: list[AnyCommunicator] = []

    def communicator(self, name: str, ranks: Sequence[int] | None = None, *, control: bool = False) -> AnyCommunicator:
        members = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        self._check(name, members)
        made = LocalCommunicator(name, self.rank) if len(members) == 1 else PaperCommunicator(name, members, self.rank)
        self._made.append(made)
        return made

    def close(self) -> None:
        self._made.clear()


def paper_mesh(settings: Config, world_size: int, rank: int = 0, stages: int = 1) -> tuple[Mesh, PaperFabric]:
    """The mesh of `settings` as `rank` would see it. Raises what `zeroengine.initialize` would: `ConfigError`."""
    degrees = mesh_degrees(settings, world_size, stages)
    fabric = PaperFabric(rank, world_size)
    return Mesh.over(fabric, degrees, None, settings.mesh.ep), fabric
