"""The comparison of operations that precedes every movement of data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.comm.fingerprint import SUBJECT_BYTES, Fingerprint, decode, divergence
from zeroengine.comm.lane import Operation
from zeroengine.comm.transport import FixedOrder
from zeroengine.comm.wire import Wire


class HeaderCheck:
    """All-gathers a fixed-size header an operation; raises `DivergenceError` on every rank when headers differ."""

    def __init__(self, name: str, wire: Wire, ranks: tuple[int, ...], rank: int) -> None:
        self.name = name
        self._wire = wire
        self.ranks = ranks
        self.rank = rank
        self._flat = torch.empty(len(ranks) * Fingerprint.WIDTH, dtype=torch.int64)
        self._all = self._flat.view(len(ranks), Fingerprint.WIDTH)

    def verify(self, operation: Operation) -> None:
        own = torch.tensor(operation.fingerprint.header(operation.index), dtype=torch.int64)
        self._wire.all_gather(self._flat, own)
        if torch.equal(self._all, own.expand_as(self._all)):
            return
        # every rank sees the same headers, hence every rank comes here and takes part in the exchange of texts
        text = torch.frombuffer(bytearray(operation.fingerprint.text()), dtype=torch.uint8)
        texts = torch.empty(len(self.ranks) * SUBJECT_BYTES, dtype=torch.uint8)
        self._wire.all_gather(texts, text)
        raise self._error(texts.view(len(self.ranks), SUBJECT_BYTES))

    def _error(self, texts: Tensor) -> Exception:
        lines = [
            (rank, decode(header, bytes(text.tolist()))) for rank, header, text in zip(self.ranks, self._all.tolist(), texts, strict=True)
        ]
        return divergence(self.name, self.ranks[self.rank], lines)

    @staticmethod
    def verify_splits(
        transport: FixedOrder,
        name: str,
        receives: Sequence[int],
        sends: Sequence[int],
        mark: Fingerprint,
    ) -> None:
        """Every pair of ranks must agree on the size of its block of an uneven all_to_all."""
        size, me = transport.size, transport.rank
        matrix = torch.empty(size, 2, size, dtype=torch.int64)
        transport.all_gather(matrix, torch.tensor([list(sends), list(receives)], dtype=torch.int64))
        sent, expected = matrix[:, 0], matrix[:, 1].t()  # [from, to]
        if torch.equal(sent, expected):
            return
        lines = []
        for src, dst in (sent != expected).nonzero().tolist():
            text = f"{mark.describe()}: sends {int(sent[src, dst])} to rank {transport.ranks[dst]}"
            lines.append((transport.ranks[src], text + f", which expects {int(expected[src, dst])}"))
        raise divergence(name, transport.ranks[me], lines)
