"""Steps that are skipped because gradients are not finite: counted, and told with their cause."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator
from zeroengine.errors import NonFiniteError
from zeroengine.logging import warn_rank0

_SAY_ALL, _SAY_EVERY = 3, 50  # so many skips in a row are told, and then one in so many


class Skips:
    """Counts skipped steps. `most`: so many in a row are an error; `control`: the ranks that skip together."""

    def __init__(self, control: Communicator, most: int) -> None:
        self.total = 0
        self.most = most
        self._in_a_row = 0
        self._control = control

    def applied(self) -> None:
        """A step was not skipped."""
        self._in_a_row = 0

    def loss_at_fault(self, losses: Sequence[Tensor]) -> str | None:
        """Which ranks' losses are not finite themselves, None if no rank's. `losses`: of this rank's micro-batches. Collective."""
        kinds = [2 if math.isnan(loss) else int(math.isinf(loss)) for loss in map(float, losses)]
        mine = torch.tensor([max(kinds, default=0)])
        found = self._control.exchange(mine, "losses that are not finite").flatten().tolist()
        if not any(found):
            return None
        ranks = ", ".join(str(r) for r, kind in zip(self._control.ranks, found, strict=True) if kind)
        return f"the loss itself is {'NaN' if 2 in found else 'inf'} on rank {ranks}: the fault is in forward or in the data"

    def count(self, cause: str, scale: float) -> None:
        """One more step was skipped, at this loss scale. Raises `NonFiniteError` when it was the last one in a row that may be."""
        self.total += 1
        self._in_a_row += 1
        if self._in_a_row <= _SAY_ALL or self._in_a_row % _SAY_EVERY == 0:
            at = f"; loss scale {scale:g}" if scale != 1.0 else ""
            warn_rank0(f"step skipped on all ranks ({self.total} so far): {cause}{at}")
        if self._in_a_row >= self.most:
            raise NonFiniteError(
                f"{self._in_a_row} steps in a row had non-finite gradients; the last: {cause}. Lower the learning rate, "
                "look at the data of these batches, or train in bf16 or fp32"
            )
