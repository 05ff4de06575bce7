"""Activations that wait for backward elsewhere: on the host of an accelerator, or on a disk.

Both are pairs of autograd's saved-tensor hooks, so they reach what autograd saves: all activations of the modules that run
inside, or the inputs of a recomputed segment (`torch.utils.checkpoint` with use_reentrant=True saves those). Weights stay: the
sharder's hooks, further in, keep references to buckets (`zero/sharder.py`), and memory of other parameters is told by address.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroengine.offload.buffers import pinned_bytes
from zeroengine.offload.home import at_hand
from zeroengine.offload.record import Record
from zeroengine.offload.saved import SavedOther
from zeroengine.offload.store import DiskStore

_NEXT = 2  # records that are read ahead in backward


class Moved(Protocol):
    """What autograd keeps in place of a tensor."""

    def unpack(self) -> Tensor: ...


class OnHost:
    """A copy in memory of the host, page-locked if so wanted and possible."""

    def __init__(self, tensor: Tensor, pin: bool) -> None:
        self._device = tensor.device
        memory = pinned_bytes(tensor.nbytes) if pin else torch.empty(tensor.nbytes, dtype=torch.uint8)
        self._copy = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._copy.copy_(tensor.detach(), non_blocking=pin)

    def unpack(self) -> Tensor:
        return self._copy.to(self._device, non_blocking=True)


class _OnDisk:
    """A record of the values. With the last reference its place in the file is free again."""

    def __init__(self, owner: ActivationsOnDisk, tensor: Tensor) -> None:
        self._owner = owner
        held = self._held = tensor.detach()  # shares its memory until it is put away; `tensor` itself stays as it is
        self.record = owner.store.record(f"an activation of shape {tuple(tensor.shape)}", lambda: [held])
        with at_hand(self.record, changed=True):
            pass
        owner.store.check_writes()

    def unpack(self) -> Tensor:
        self._owner.approach(self.record)
        with at_hand(self.record, changed=False):
            return self._held.clone()

    def __del__(self) -> None:
        record = getattr(self, "record", None)
        if record is not None:
            self._owner.store.release(record)


class _Activations(contextlib.AbstractContextManager[None]):
    """Inside, what autograd saves is moved if it is large enough and not kept: subclasses say where. May be entered again."""

    def __init__(self, keep: Iterable[Tensor], least: int) -> None:
        self._keep = {_address(t) for t in keep}
        self._least = least
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)

    def _pack(self, tensor: Tensor) -> Moved | SavedOther:
        usual = tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not usual or tensor.nbytes < self._least or _address(tensor) in self._keep:
            return SavedOther(tensor)
        return self.move(tensor)

    def move(self, tensor: Tensor) -> Moved:
        raise NotImplementedError(f"{type(self).__name__} says where activations go")


class ActivationsOnHost(_Activations):
    """Inside, tensors of an accelerator of `least` bytes and more that autograd saves wait in memory of the host. `keep`: tensors
    (parameters) whose memory stays where it is."""

    def __init__(self, keep: Iterable[Tensor], least: int, pin: bool) -> None:
        super().__init__(keep, least)
        self._pin = pin

    def move(self, tensor: Tensor) -> Moved:
        return OnHost(tensor, self._pin) if tensor.device.type != "cpu" else SavedOther(tensor)


class ActivationsOnDisk(_Activations):
    """Inside, tensors of `least` bytes and more that autograd saves go to `store`, and come back when backward reads them, the
    next ones ahead. `keep`: tensors (parameters) whose memory stays where it is.

    Raises OffloadError in forward and backward where the disk fails.
    """

    def __init__(self, store: DiskStore, keep: Iterable[Tensor], least: int) -> None:
        super().__init__(keep, least)
        self.store = store
        self._order: list[weakref.ref[Record]] = []  # as they were saved: backward reads from the end

    def move(self, tensor: Tensor) -> Moved:
        saved = _OnDisk(self, tensor)
        self._order.append(weakref.ref(saved.record))
        return saved

    def approach(self, record: Record) -> None:
        """Backward is at `record`: those that were saved before it come next."""
        while self._order and self._order[-1]() is not record:
            self._order.pop()
        for before in reversed(self._order[-1 - _NEXT : -1]):
            if (found := before()) is not None:
                found.ahead()


def _unpack(packed: Moved | SavedOther) -> Tensor:
    return packed.unpack()


def _address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for tensors without any of their own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
