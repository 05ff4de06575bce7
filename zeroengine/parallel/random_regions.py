"""Random numbers in a tensor group: alike where activations are alike, different where each rank has its own part."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator


class RandomRegion:
    """Between a column- and a row-parallel layer (attention probabilities, hidden units) dropout draws from a stream of this
    rank; elsewhere from the common one. The rank's stream is seeded from the common one each time, so that recomputation,
    which restores the common state, draws the same numbers again. Where `device` is meta no numbers are drawn."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._outer: list[Tensor] | None = None

    def synchronize(self) -> None:
        """The first rank's states of the default generators become everybody's. Collective."""
        if self._device.type == "meta":
            return
        states = []
        for state in self._states():
            moved = state.to(self._device)
            self._comm.broadcast(moved, 0, "random state").wait()
            states.append(moved.cpu())
        self._restore(states)

    def enter(self, training: bool) -> None:
        """Behind a column-parallel layer; the second and later of a region change nothing."""
        if not training or self._outer is not None or self._device.type == "meta":
            return
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        self._outer = self._states()
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * (self._comm.rank + 1)) % 2**63)

    def leave(self) -> None:
        """Before a row-parallel layer."""
        if self._outer is not None:
            outer, self._outer = self._outer, None
            self._restore(outer)

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _restore(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)
