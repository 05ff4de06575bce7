"""The communicator of a group of one rank: same semantics, no process group, no bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.comm import checks
from zeroengine.comm.protocol import ReduceOp, Traffic, Work


class Finished:
    """Work that ended before it was returned."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class LocalCommunicator:
    """A group of one. Works on every device, on the current stream."""

    def __init__(self, name: str, rank: int = 0) -> None:
        self.name = name
        self.ranks: tuple[int, ...] = (rank,)
        self.rank = 0
        self.size = 1
        self.traffic = Traffic()

    def empty(self, numel: int, like: Tensor) -> Tensor:
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def all_gather(self, full: Tensor, shard: Tensor, subject: str) -> Work:
        checks.check_gather(self.name, 1, full, shard, subject)
        return self._copy("all_gather", full, shard)

    @torch.no_grad()
    def reduce_scatter(self, shard: Tensor, full: Tensor, subject: str, *, scale: float = 1.0, accumulate: bool = False) -> Work:
        checks.check_reduce_scatter(self.name, 1, shard, full, scale, subject)
        self.traffic.count("reduce_scatter", 0)
        shard, full = shard.view(-1), full.view(-1)
        if accumulate:
            # scaled first and added then, as the multi-rank communicators do: the same bits
            shard.add_(full.to(shard.dtype) * scale if scale != 1.0 else full.to(shard.dtype))
        else:
            if shard.data_ptr() != full.data_ptr() or shard.dtype != full.dtype:
                shard.copy_(full)
            if scale != 1.0:
                shard.mul_(scale)
        return Finished()

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, subject: str, *, op: ReduceOp = "sum", scale: float = 1.0) -> Work:
        checks.check_scale(self.name, tensor, scale, subject, op)
        self.traffic.count("all_reduce", 0)
        if scale != 1.0:
            tensor.mul_(scale)
        return Finished()

    def broadcast(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.require(src == 0, f"source {src} of a group of one", self.name, subject)
        self.traffic.count("broadcast", 0)
        return Finished()

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        subject: str,
        *,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        checks.check_all_to_all(self.name, 1, output, input, subject, output_splits, input_splits)
        checks.require(output.numel() == input.numel(), "all_to_all of a group of one: unequal sizes", self.name, subject)
        return self._copy("all_to_all", output, input)

    def send(self, tensor: Tensor, dst: int, subject: str) -> Work:
        checks.check_peer(self.name, 1, 0, dst, subject)
        return Finished()

    def recv(self, tensor: Tensor, src: int, subject: str) -> Work:
        checks.check_peer(self.name, 1, 0, src, subject)
        return Finished()

    def exchange(self, values: Tensor, subject: str) -> Tensor:
        self.traffic.count("exchange", 0)
        return values.detach().reshape(1, -1).clone()

    def barrier(self, subject: str) -> None:
        self.traffic.count("barrier", 0)

    def pool_bytes(self) -> int:
        return 0

    def close(self) -> None:
        return

    @torch.no_grad()
    def _copy(self, kind: str, output: Tensor, input: Tensor) -> Work:
        self.traffic.count(kind, 0)
        if output.data_ptr() != input.data_ptr():
            output.view(-1).copy_(input.view(-1))
        return Finished()
