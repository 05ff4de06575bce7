"""Frozen parameters whose values every rank keeps whole: they are in no bucket, but edits of them must be alike as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroengine.wording import listed
from zeroengine.zero.edits import digest
from zeroengine.zero.holders import Holders


@dataclass(frozen=True)
class FrozenWhole:
    """What the engine notes on such a parameter (`param._zero_frozen`)."""

    name: str
    holders: Holders

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # a copied parameter is nobody's


def _nothing() -> None:
    return None


def note_frozen(param: nn.Parameter, name: str, holders: Holders) -> None:
    param._zero_frozen = FrozenWhole(name, holders)  # type: ignore[attr-defined]


def forget_frozen(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        if hasattr(param, "_zero_frozen"):
            del param._zero_frozen


def frozen_whole(param: Tensor) -> FrozenWhole | None:
    return getattr(param, "_zero_frozen", None)


class FrozenEdits:
    """Edits of frozen whole parameters between the making of this and `settle`, which is collective."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._groups: dict[Holders, list[tuple[str, Tensor, int]]] = {}
        for param in params:
            note = frozen_whole(param)
            if note is not None:
                self._groups.setdefault(note.holders, []).append((note.name, param, param._version))

    def settle(self, modifier_rank: int | None) -> str | None:
        """Takes the values of `modifier_rank`; without it, returns what was not edited alike on all ranks, if anything."""
        for holders, members in self._groups.items():
            if modifier_rank is not None:
                for name, param, _ in members:
                    values = param.data.contiguous().view(-1)
                    holders.broadcast(values, f"edit of {name}", modifier_rank)
                    if values.data_ptr() != param.data_ptr():
                        param.data.copy_(values.view(param.shape))
                continue
            written = torch.tensor([int(param._version != version) for _, param, version in members])
            touched = holders.exchange(written, "edits of frozen parameters").amax(0).tolist()
            edited = [(name, param) for (name, param, _), flag in zip(members, touched, strict=True) if flag]
            if edited:
                digests = torch.tensor([digest(p.data.contiguous().view(-1)) for _, p in edited])
                table = holders.exchange(digests, "edited frozen parameters")
                differs = (table != table[0]).any(0).tolist()
                odd = [name for (name, _), flag in zip(edited, differs, strict=True) if flag]
                if odd:
                    return listed(odd)
        return None
