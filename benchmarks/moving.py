"""The job of a process in `benchmarks.collectives`: one collective (or one message from each rank to the next) of one system at a
time, on all ranks together."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from zeroengine.comm import Fabric, all_gather_into_tensor, init_distributed, reduce_scatter_tensor
from zeroengine.ops.aio import copy_away

SYSTEMS = ("shared", "staged", "gloo", "memcpy", "limit")


class MovingJob:
    """`shared`: our collectives on memory from `Communicator.empty`; `staged`: on ordinary memory; `gloo`: the process
    group's own; `memcpy`: one copy of the full tensor on every rank at once, as a measure of the machine; `limit`: copies past the
    caches, on every rank at once, of as many bytes as the operation must read and write there (`least_bytes`), in such memory, too.

    fp32; a size is that of the full tensor in bytes. Copies end, as operations do, when those of all ranks have ended.
    """

    def __init__(self, sizes: list[int]):
        init_distributed(verbose=False)
        self.comm = Fabric().communicator("benchmark")
        self.full: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        like = torch.empty(0)
        for size in sizes:
            numel = size // 4 // self.comm.size * self.comm.size
            for system in SYSTEMS:
                make = self.comm.empty if system in ("shared", "limit") else _ordinary
                self.full[system, size] = (make(numel, like).fill_(1.0), make(numel, like).fill_(1.0))

    def ready(self) -> dict[str, Any]:
        return {"moves_over": getattr(self.comm, "moves_over", "nothing"), "torch": torch.__version__}

    def turn(self, system: str, operation: str, size: int, repeats: int) -> dict[str, Any]:
        """Seconds of each repetition, from a barrier to the end on this rank."""
        full, other = self.full[system, size]
        seconds = []
        for _ in range(repeats):
            self.comm.barrier("start")
            start = time.perf_counter()
            if system == "memcpy":
                other.copy_(full)
                self.comm.barrier("copied")
            elif system == "limit":
                self._copy(least_bytes(operation, size, self.comm.size, self.comm.rank) // 2, full, other)
                self.comm.barrier("copied")
            elif system == "gloo":
                self._gloo(operation, full, other)
            else:
                self._ours(operation, full, other)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    @staticmethod
    def _copy(nbytes: int, full: torch.Tensor, other: torch.Tensor) -> None:
        while (part := min(nbytes // full.element_size(), full.numel())) > 0:
            copy_away(other[:part], full[:part])
            nbytes -= part * full.element_size()

    def _ours(self, operation: str, full: torch.Tensor, other: torch.Tensor) -> None:
        comm, shard = self.comm, other[: full.numel() // self.comm.size]
        if operation == "all_gather":
            work = comm.all_gather(full, shard, operation)
        elif operation == "reduce_scatter":
            work = comm.reduce_scatter(shard, full, operation, scale=1 / comm.size)
        elif operation == "all_reduce":
            work = comm.all_reduce(full, operation, scale=1 / comm.size)
        elif operation == "broadcast":
            work = comm.broadcast(full, 0, operation)
        elif operation == "message":
            sent = comm.send(full, (comm.rank + 1) % comm.size, operation)
            work = comm.recv(other, (comm.rank - 1) % comm.size, operation)
            sent.wait()
        else:
            work = comm.all_to_all(other, full, operation)
        work.wait()

    def _gloo(self, operation: str, full: torch.Tensor, other: torch.Tensor) -> None:
        shard = other[: full.numel() // self.comm.size]
        if operation == "all_gather":
            all_gather_into_tensor(full, shard)
        elif operation == "reduce_scatter":
            reduce_scatter_tensor(shard, full)
        elif operation == "all_reduce":
            dist.all_reduce(full)
            full.div_(self.comm.size)
        elif operation == "broadcast":
            dist.broadcast(full, 0)
        elif operation == "message":
            sent = dist.isend(full, (self.comm.rank + 1) % self.comm.size)
            dist.recv(other, (self.comm.rank - 1) % self.comm.size)
            if sent is not None:
                sent.wait()
        else:
            dist.all_to_all_single(other, full)


def least_bytes(operation: str, size: int, ranks: int, rank: int) -> int:
    """Bytes that a rank reads and writes in an operation on a tensor of `size` bytes, if every rank reads the others' memory where it
    lies and no result is in a cache when it is read again. broadcast is from rank 0."""
    gather, shard = 2 * size, size // ranks
    return {
        "all_gather": gather,
        "reduce_scatter": size + shard,
        "all_reduce": size + shard + 2 * (size - shard),
        "broadcast": gather * int(rank != 0),
        "all_to_all": gather,
        "message": gather,
    }[operation]


def _ordinary(numel: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(numel, dtype=like.dtype)
