"""Where the memory of some tensors is between uses, as those who use them see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor


def stub(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for a tensor whose values are elsewhere: one element (NaN where the type has one) that looks like `shape`, and cannot
    be written."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((1,) * len(shape), fill, dtype=dtype, device=device).expand(shape)


class Home(Protocol):
    """Tensors stay the same objects with the same shapes. Between `bring` and `put` they have their values; at other times
    they may have none (a `stub`)."""

    def ahead(self) -> None:
        """A use comes soon: bringing may begin, as far as memory that is set aside for it allows."""
        ...

    def bring(self) -> None:
        """The tensors have their values when this returns. Nests. Raises OffloadError."""
        ...

    def put(self, changed: bool) -> None:
        """Ends what `bring` began. `changed`: values were written, or tensors were added. Raises OffloadError."""
        ...

    def drop(self) -> None:
        """What `ahead` began is not needed after all."""
        ...

    def alias(self, view: Tensor, base: Tensor, offset: int) -> None:
        """`view` is to lie `offset` bytes into `base`, a tensor of this home, wherever that is."""
        ...

    def owns(self, members: Callable[[], Iterable[Tensor]]) -> None:
        """`members` gives the tensors that live here from now on; asked again whenever something changed."""
        ...

    @property
    def in_memory(self) -> bool:
        """The tensors always have their values."""
        ...


class Memory:
    """The tensors are in memory for good."""

    in_memory = True

    def ahead(self) -> None:
        return

    def bring(self) -> None:
        return

    def put(self, changed: bool) -> None:
        return

    def drop(self) -> None:
        return

    def alias(self, view: Tensor, base: Tensor, offset: int) -> None:
        return

    def owns(self, members: Callable[[], Iterable[Tensor]]) -> None:
        return


@contextlib.contextmanager
def at_hand(*homes: Home, changed: bool) -> Iterator[None]:
    """Context in which the tensors of `homes` have their values. What was written under an exception is kept, too."""
    with contextlib.ExitStack() as stack:
        for home in homes:
            home.bring()
            stack.callback(home.put, changed)
        yield
