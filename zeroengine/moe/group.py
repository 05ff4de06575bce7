"""The ranks that share the experts of a model, and how tokens travel between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zeroengine.comm.fabric import Fabric
from zeroengine.comm.local import LocalCommunicator
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError

Wire = Literal["same", "bf16", "fp8"]


@dataclass(frozen=True)
class Hops:
    """The two streams of a two-hop all-to-all: the ranks of one node, and those of all nodes with the same place in theirs.
    The rank in the whole group is between.rank * inside.size + inside.rank."""

    inside: Communicator
    between: Communicator


def _all_valid(mask: Tensor | None) -> Tensor | None:
    return mask


@dataclass(frozen=True)
class Batch:
    """The tokens of the global batch. `ranks`: control over all ranks that hold tokens of their own, among which gradients are
    averaged, but for ranks that split a sequence inside a tensor group, whose gradients are added: `averaged` is the divisor.
    `valid`: from a mask of the tokens that the model was given (None: all are) to that of the rows that this rank's layers see,
    of every sample or of one for all; None where all rows are tokens. `ordered`: rows are those of whole samples, in the order of
    ranks."""

    ranks: Communicator
    averaged: float
    valid: Callable[[Tensor | None], Tensor | None] = _all_valid
    ordered: bool = True

    @staticmethod
    def over(ranks: Communicator) -> Batch:
        return Batch(ranks, ranks.size)

    def valid_rows(self, mask: Tensor | None, count: int) -> Tensor | None:
        """Which of `count` rows of this rank's layers are tokens, [count]; None: all. See `valid`."""
        valid = self.valid(mask)
        if valid is None:
            return None
        flat = valid.reshape(-1)
        return flat.repeat(count // flat.numel())  # of one sample for all of them

    def tokens(self, rows: Tensor) -> Tensor:
        """`rows` [T, ...] without those of padding."""
        valid = self.valid_rows(None, rows.shape[0])
        return rows if valid is None else rows[valid.to(rows.device)]


@dataclass(frozen=True)
class ExpertGroup:
    """`tokens`: the stream between the ranks that share the experts (rank r holds the r-th part of them); `control` the same
    ranks over CPU tensors. `wire`: type in which tokens travel. `copies`: copies of experts are made where that evens the ranks'
    loads, once the largest is more than `tolerance` times the mean."""

    tokens: Communicator
    control: Communicator
    batch: Batch
    hops: Hops | None = None
    wire: Wire = "same"
    copies: bool = False
    tolerance: float = 1.0

    @property
    def size(self) -> int:
        return self.tokens.size

    @property
    def rank(self) -> int:
        return self.tokens.rank

    @property
    def always_borrows(self) -> bool:
        """Copies are sent also where there are none: other ranks, which have other tokens and hold the same parameters, must find
        the gradients of these in the same order."""
        return self.copies and self.size > 1 and not self.batch.ordered

    def __deepcopy__(self, memo: object) -> ExpertGroup:
        return self if self.size > 1 else alone()  # a copy of a model that has all its experts belongs to no engine

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return alone, ()  # a pickled model is a plain one


def alone() -> ExpertGroup:
    """One rank that holds all experts and sees the whole batch."""
    return ExpertGroup(LocalCommunicator("experts"), LocalCommunicator("experts control"), Batch.over(LocalCommunicator("batch")))


def make_hops(fabric: Fabric, ranks: Sequence[int], per_node: int) -> Hops:
    """Streams for two hops over `ranks` (ascending), `per_node` neighbours on a node. Collective over `ranks`.

    Raises `ConfigError` if nodes would not be equal.
    """
    size = len(ranks)
    if per_node < 1 or size % per_node:
        raise ConfigError(
            f"moe.ranks_per_node {per_node} does not divide the {size} ranks that share the experts; two hops need as many of "
            "them on each node: give a divisor, or set moe.two_hop to false"
        )
    node, place = divmod(list(ranks).index(fabric.rank), per_node)
    return Hops(
        fabric.communicator("experts inside a node", ranks[node * per_node : (node + 1) * per_node]),
        fabric.communicator("experts between nodes", ranks[place::per_node]),
    )
