"""The update of masters and optimizer state that do not live where the values are computed: bucket by bucket.

While one bucket is updated, the next ones' state comes from its disk and the last one's goes back (`offload/store.py`); on an
accelerator gradients come down to the host and values go up on a stream of their own (`offload/link.py`). The bits are those
of an update of everything at once: parts and arithmetic are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.errors import ConfigError
from zeroengine.offload.buffers import padded, rounded
from zeroengine.offload.placement import Placement
from zeroengine.ops.optimizer import FusedOptimizer
from zeroengine.optim.kinds import steps_apart
from zeroengine.optim.state import moments
from zeroengine.optim.update import FlatMaster
from zeroengine.optim.whole import WholeUpdate


class AwayUpdate:
    """Updates those of `masters` whose state is elsewhere (see `FlatMaster.away`).

    Raises ConfigError for an optimizer that cannot be stepped bucket by bucket.
    """

    def __init__(
        self, placement: Placement, masters: Sequence[FlatMaster], optimizer: torch.optim.Optimizer, whole: WholeUpdate | None
    ) -> None:
        self.placement = placement
        self.masters = [m for m in masters if m.away]
        self._optimizer = optimizer
        self._check(whole)
        for master in self.masters:
            master.owns_state(self.state)
        if whole is not None:
            whole.owns_state(self.state)

    def _check(self, whole: WholeUpdate | None) -> None:
        name, cls = type(self._optimizer).__name__, type(self._optimizer)
        if not self.masters:
            return
        if not issubclass(cls, FusedOptimizer) and not steps_apart(cls):
            raise ConfigError(
                f"zero_optimization.offload_optimizer: the state of {name} would be updated bucket by bucket, by several calls of "
                "its `step`, and it is not known to count steps by parameter; declare so with a class attribute "
                "`steps_apart = True` if it does, or remove the section"
            )
        if whole is not None and any(m.flat.device != m.bucket.device for m in self.masters):
            raise ConfigError(
                f"zero_optimization.offload_optimizer: {name} updates whole parameters, which the host of an accelerator does not "
                "do here; use an element-wise optimizer (AdamW, SGD, Lion, ...), or remove the section"
            )

    def state(self, view: Tensor) -> list[Tensor]:
        """What the optimizer keeps for a part, step counts and the like aside."""
        return [v for v in self._optimizer.state.get(view, {}).values() if isinstance(v, Tensor) and v.dim()]

    def ahead(self, first: int = 0) -> None:
        """Begins to bring the state of the buckets from number `first` on, as far as the buffers go."""
        for master in self.masters[first : first + self.placement.state_rule.buffers]:
            master.home.ahead()
            master.bucket.home.ahead()

    def run(self, used: frozenset[str], factor: float) -> None:
        """Updates, and issues what brings the values to the other ranks; of buckets that `WholeUpdate` has a part in only
        `finish` does. A failing disk is kept for `placement.agree`: the ranks issue the same operations all the same."""
        link, faults = self.placement.link, self.placement.faults
        arriving = link.down(self.masters[0].gradients.updated) if self.masters else None
        for i, master in enumerate(self.masters):
            reduced = arriving.wait() if arriving is not None else master.gradients.updated
            if i + 1 < len(self.masters):
                arriving = link.down(self.masters[i + 1].gradients.updated)
            self.ahead(i + 1)
            if faults.first is None:
                with faults.kept(), master.at_hand(changed=True):
                    written = self._step(master, used, factor, reduced)
                    if not master.apart:
                        master.settle(written)
            self.check_writes()
            if not master.apart:
                master.announce()

    def check_writes(self) -> None:
        """What could not be stored is a fault: going on would take more and more memory."""
        for store in self.placement.stores:
            with self.placement.faults.kept():
                store.check_writes()

    def finish(self) -> None:
        """Publishes what `run` left to be published."""
        for master in self.masters:
            if not master.apart:
                continue
            if self.placement.faults.first is None:
                with self.placement.faults.kept(), master.at_hand(changed=True):
                    master.settle(written=False)
            master.announce()
        self.check_writes()

    def _step(self, master: FlatMaster, used: frozenset[str], factor: float, reduced: Tensor) -> bool:
        """Updates the flat parts of one bucket. Returns whether the values were written as well."""
        if isinstance(self._optimizer, FusedOptimizer):
            grads: dict[Tensor, Tensor] = {}
            copies: dict[Tensor, Tensor] = {}
            master.feed(used, grads, copies, reduced)
            self._optimizer.step(grad_scale=factor, copies=copies, grads=grads)
            return True
        if factor != 1.0:
            reduced.mul_(factor)
        master.link(used, reduced)
        self._optimizer.step()
        master.unlink()
        return False

    def settle(self) -> None:
        """Gives the state that the optimizer's constructor made to the homes, and sets aside what buffers and disk will need."""
        with self.placement.faults.kept():
            if self._optimizer.state:
                self.put_away()
            self.placement.reserve([self._record_bytes(m) for m in self.masters])

    def put_away(self) -> None:
        """State that was made or exchanged outside of a step goes to where it lives. Raises OffloadError."""
        for master in self.masters:
            with master.at_hand(changed=True):
                pass

    def _record_bytes(self, master: FlatMaster) -> int:
        """Bytes that the record of a bucket's masters and state will have, as far as it is known what the optimizer keeps."""
        kept = moments(self._optimizer)
        state = [kept * padded(view.nbytes) for view in master.views()]
        return rounded(master.flat.nbytes if master.separate else 0) + rounded(sum(state))
