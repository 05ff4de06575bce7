"""The memory of tensors that are made inside a context and still there: activations, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Knows the storages that operations inside it made. May be entered again; fake tensors live and die like real ones.

    `known`: storages that are not counted, as those of parameters.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {_address(t) for t in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, out)
        return out

    def see(self, func: Any, out: Any) -> None:
        """`func` gave `out`. Memory that was there is not made by a view or a write."""
        if func.is_view or func._schema.is_mutable:
            return
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._see(t)

    def alive(self) -> int:
        """Bytes of all storages that were seen and live."""
        self._made = {a: (ref, size) for a, (ref, size) in self._made.items() if not ref.expired()}
        return sum(size for _, size in self._made.values())

    def _see(self, t: Tensor) -> None:
        address = _address(t)
        seen = self._made.get(address)  # of memory that is gone since, perhaps: addresses come again
        if address not in self._known and (seen is None or seen[0].expired()):
            storage = t.untyped_storage()
            self._made[address] = StorageWeakRef(storage), storage.nbytes()


def _address(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
