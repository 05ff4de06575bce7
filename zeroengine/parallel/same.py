"""Ranks that share layers or a sequence must be given the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from zeroengine.comm.alike import differ, odd_ranks
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import DivergenceError


def fingerprint(batch: Any) -> int:
    """63 bits of the tensors and plain values of a batch."""
    digest = hashlib.blake2b(digest_size=8)
    leaves, spec = tree_flatten(batch)
    digest.update(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            values = leaf.detach().contiguous().cpu()
            digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (int, float, str, bool)):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big") >> 1


def check_same_batch(batch: Any, ranks: Communicator) -> None:
    """Raises `DivergenceError` on every rank if the ranks hold different batches. Collective over `ranks` (control)."""
    if ranks.size == 1:
        return
    rows = ranks.exchange(torch.tensor([fingerprint(batch)], dtype=torch.int64), "fingerprint of the batch").flatten().tolist()
    odd = odd_ranks(rows, ranks.ranks)
    if odd:
        raise DivergenceError(
            f"rank {ranks.ranks[ranks.rank]}: ranks {list(ranks.ranks)} share layers or a sequence and must be given the same "
            f"batch, but {differ(odd, ranks.ranks)}; shard the data by mesh.sample_group of "
            "mesh.sample_groups, or wrap the loader in zeroengine.parallel.same.SameBatches"
        )


class SameBatches:
    """A loader whose batches are checked to be the same on all `ranks` that need the same (control communicator)."""

    def __init__(self, loader: Iterable[Any], ranks: Communicator) -> None:
        self.loader = loader
        self._ranks = ranks

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            check_same_batch(batch, self._ranks)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]
