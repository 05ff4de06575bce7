"""Loops that the ranks must leave together, because each forward of a sharded model is a collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zeroengine.errors import ModelError
from zeroengine.logging import log_once
from zeroengine.mesh import Mesh

_T = TypeVar("_T")
_MORE, _OVER, _NOTHING = 0, 1, 2  # of a rank's items: one is there, they have ended, there never was one
_TOKEN_BY_TOKEN = 32  # forwards of one new token in a row


class LoopMethods:
    """Methods of `ZeroEngine` for ranks with unlike numbers of batches, or of tokens to generate."""

    mesh: Mesh

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any data-parallel rank. Collective.

        while engine.any_rank(not done):     # as many forwards on every rank, and no more than the longest needs
            logits = engine(ids)
            if not done: ...
        """
        return bool(self.mesh.control.exchange(torch.tensor([int(bool(flag))]), "whether any rank goes on").any())

    def even(self, items: Iterable[_T]) -> Iterator[tuple[_T, bool]]:
        """(item, True) for each of `items`; a rank whose items have ended goes on with (its last one, False) until those of all
        ranks have. What an engine computes on a repeated item is for the others only: in training give its loss no weight
        (`engine.backward(loss_sum * 0, tokens=0)`). Collective. Raises `ModelError` on all ranks if one has nothing to repeat."""
        source, last, had = iter(items), None, False
        while True:
            try:
                last, state = next(source), _MORE
                had = True
            except StopIteration:
                state = _OVER if had else _NOTHING
            states = self.mesh.control.exchange(torch.tensor([state]), "whether any rank has another item").flatten().tolist()
            if all(s != _MORE for s in states):
                return
            idle = [r for r, s in zip(self.mesh.control.ranks, states, strict=True) if s == _NOTHING]
            if idle:
                raise ModelError(
                    f"rank {self.mesh.rank}: engine.even: ranks {idle} have no item at all, and nothing to repeat while the others "
                    "go on; give every rank at least one"
                )
            yield last, state == _MORE  # type: ignore[misc]


class TokenByToken:
    """Notices generation that gathers a sharded model anew for each token, and says once how to avoid it."""

    def __init__(self, gathers: bool) -> None:
        self._gathers = gathers
        self._seen = 0

    def look(self, inputs: Any) -> None:
        """Before each forward."""
        if not self._gathers:
            return
        lengths = [t.shape[1] for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim() == 2 and not t.is_floating_point()]
        alone = not torch.is_grad_enabled() and bool(lengths) and min(lengths) == 1
        self._seen = self._seen + 1 if alone else 0
        if self._seen == _TOKEN_BY_TOKEN:
            log_once(
                f"{_TOKEN_BY_TOKEN} forwards of one token each: at stage 3 every one gathers all parameters again. If they fit, gather "
                "them once: `with zeroengine.zero.GatheredParameters(model.parameters()): model.generate(...)`"
            )
