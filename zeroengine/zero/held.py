"""Parameters of a model that no engine holds yet, cut over all ranks one by one while it is built.

A `HeldParameter` is released (`residency.py`) as soon as its module is done with it. Whatever touches it afterwards (a second
initialiser, `load_state_dict`, a resized embedding) gathers it, and it stays a plain, whole parameter until the next one is
touched: so edits need no marking, also those made through `.data`. It goes back to shards with the values of rank 0, as all
parameters do in `zeroengine.initialize`, which takes the values over bucket by bucket.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import time
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from zeroengine.comm.alike import differ, odd_ranks
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import DivergenceError
from zeroengine.offload.home import stub
from zeroengine.zero.edits import digest
from zeroengine.zero.host import HeapTrimmer, host_memory
from zeroengine.zero.pool import is_alone
from zeroengine.zero.residency import ReleasedParameter, Slot, slot_of

_ONLY_OURS = 2  # references to a parameter that nobody else knows: the list of whole ones, and the argument of getrefcount
_PATIENCE, _PAUSE = 20, 5e-4  # times, seconds


class _State(enum.IntEnum):
    """Of a whole parameter, on one rank. The largest of all ranks' counts."""

    GONE = 0  # it was replaced: only the group knows it
    IDLE = 1
    IN_USE = 2


class HeldParameter:
    """One parameter: whole, or this rank's slice (`shard`, on the host)."""

    def __init__(self, group: HeldGroup, param: nn.Parameter, name: str, index: int) -> None:
        self.group = group
        self.param = weakref.ref(param)
        self.subject = name
        self.index = index
        self.cls = type(param)
        self.shard: Tensor | None = None
        self.pins = 0

    @property
    def comm(self) -> Communicator:
        return self.group.comm

    @property
    def dtype(self) -> torch.dtype:
        return self._alive().dtype

    @property
    def device(self) -> torch.device:
        return self._alive().device

    @torch.no_grad()
    def release(self, dtype: torch.dtype | None) -> None:
        """Makes rank 0's values everybody's and keeps this rank's slice of them, in `dtype`. Collective."""
        param = self._alive()
        flat = param.detach().contiguous().view(-1).cpu()
        self.comm.broadcast(flat, 0, self.subject).wait()
        flat = flat if dtype is None or not flat.is_floating_point() else flat.to(dtype)
        per_rank = -(-flat.numel() // self.comm.size)
        mine = flat[self.comm.rank * per_rank : (self.comm.rank + 1) * per_rank]
        self.shard = host_memory(per_rank, flat.dtype)
        self.shard[: mine.numel()] = mine
        param.data = stub(param.shape, flat.dtype, param.device)
        param.__class__ = ReleasedParameter

    @torch.no_grad()
    def gather(self) -> None:
        """Makes `param` a plain parameter with all its values. Collective."""
        shard, param = self.shard, self._alive()
        if shard is None:
            return
        flat = host_memory(shard.numel() * self.comm.size, shard.dtype)
        self.comm.all_gather(flat, shard, self.subject).wait()
        with torch._C.DisableTorchFunctionSubclass():
            param.data = flat[: param.numel()].view(param.shape).to(param.device)
            param.__class__ = self.cls
        self.shard = None

    @torch.no_grad()
    def settle(self, modifier_rank: int | None) -> None:
        """Makes an edit of the whole values everybody's, or compares those of all ranks. Collective."""
        param = self._alive()
        flat = param.detach().reshape(-1).cpu()
        if modifier_rank is not None:
            self.comm.broadcast(flat, modifier_rank, f"edit of {self.subject}").wait()
            param.copy_(flat.view(param.shape))
            return
        table = self.comm.exchange(torch.tensor([digest(flat)]), f"edit of {self.subject}")
        odd = odd_ranks(table.flatten().tolist(), self.comm.ranks)
        if odd:
            raise DivergenceError(
                f"rank {self.comm.ranks[self.comm.rank]}: parameter '{self.subject}' was edited inside GatheredParameters, but "
                f"not to the same values on all ranks ({differ(odd, self.comm.ranks)}); name the rank whose edit counts with "
                "modifier_rank=..., or make the same edit everywhere"
            )

    def move(self, device: torch.device) -> None:
        """The values belong on `device` from now on; a slice stays on the host."""
        param = self._alive()
        with torch._C.DisableTorchFunctionSubclass():
            param.data = stub(param.shape, param.dtype, device) if self.shard is not None else param.data.to(device)

    def _alive(self) -> nn.Parameter:
        param = self.param()
        if param is None:
            raise ReferenceError(f"parameter '{self.subject}' does not exist any more")
        return param


class HeldGroup:
    """The held parameters of one construction, and the ranks that share them. `connect` makes the communicator when the
    first parameter needs it; it ends with the last parameter. `dtype`: of floating-point parameters once they are released;
    None keeps what the model gives them.

    Which parameter is whole at a time depends on the order in which they are used, so all ranks must build the same model."""

    whole_on_use = True

    def __init__(self, connect: Callable[[], tuple[Communicator, Callable[[], None]]], dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._connect = connect
        self._open: tuple[Communicator, Callable[[], None]] | None = None
        self._whole: list[nn.Parameter] = []
        self._members: weakref.WeakSet[HeldParameter] = weakref.WeakSet()
        self._count = 0
        self._heap = HeapTrimmer()

    @property
    def comm(self) -> Communicator:
        if self._open is None:
            self._open = self._connect()
        return self._open[0]

    def add(self, param: nn.Parameter, name: str) -> None:
        """Takes a whole parameter in; it is released when the next flush comes."""
        held = HeldParameter(self, param, name, self._count)
        self._count += 1
        param._zero = Slot(name, held, 0, type(param), self)  # type: ignore[attr-defined]
        self._members.add(held)
        self._whole.append(param)

    def flush(self) -> None:
        """Releases every whole parameter that is not in use on any rank: pinned, or its memory known to somebody else.
        Collective."""
        if not self._whole:
            return
        waiting, self._whole = self._whole, []
        # The ranks decide together: what still refers to a parameter may die later on one than on another.
        states = torch.tensor([int(self._state(i, waiting)) for i in range(len(waiting))])
        self.comm.all_reduce(states, "parameters in use", op="max").wait()
        for param, state in zip(waiting, states.tolist(), strict=True):
            held = held_by(param)
            if state == _State.IN_USE:
                self._whole.append(param)
            elif state == _State.IDLE and held is not None:
                held.release(self.dtype)
                self._heap.freed(param.numel() * param.element_size())

    @staticmethod
    def _state(index: int, waiting: list[nn.Parameter]) -> _State:
        held = held_by(waiting[index])
        if held is None or sys.getrefcount(waiting[index]) <= _ONLY_OURS:
            return _State.GONE
        if held.pins:
            return _State.IN_USE
        for _ in range(_PATIENCE):  # the backend's threads let go of what they moved a little late
            if is_alone(waiting[index]):
                return _State.IDLE
            time.sleep(_PAUSE)
        return _State.IN_USE

    def bring(self, held: HeldParameter) -> None:
        """Makes one parameter whole; others that were, and are not in use, are released first."""
        if held.shard is None:
            return
        self.flush()
        held.gather()
        self._whole.append(held._alive())

    @contextlib.contextmanager
    def using(self, param: nn.Parameter, function: str) -> Iterator[None]:
        """Context of one operation that reads `param` (see `ValueSource`)."""
        held = held_by(param)
        if held is None:
            yield
            return
        self.bring(held)
        held.pins += 1
        try:
            yield
        finally:
            held.pins -= 1

    @contextlib.contextmanager
    def editing(self, members: list[HeldParameter], modifier_rank: int | None) -> Iterator[None]:
        """Keeps several parameters whole inside the context; afterwards the values of `modifier_rank` count, or else all
        ranks must have the same. Collective."""
        for held in members:
            self.bring(held)
            held.pins += 1
        try:
            yield
        finally:
            for held in members:
                held.pins -= 1
        for held in members:  # not after an exception, which other ranks may not have
            held.settle(modifier_rank)
        self.flush()

    def computing(self) -> bool:
        """No: whatever needs the values of a detached parameter brings it then."""
        return False

    def write(self, param: nn.Parameter, values: Tensor) -> bool:
        """Never apart from gathering it (see `ValueSource`): the whole parameter is written."""
        return False

    def copy_of(self, param: nn.Parameter) -> nn.Parameter:
        """A held parameter with the same values."""
        held = held_by(param)
        if held is None or held.shard is None:
            raise ReferenceError("only a released parameter is copied by its shards")
        with torch._C.DisableTorchFunctionSubclass():
            copy = nn.Parameter(torch.empty(0, dtype=held.dtype), requires_grad=param.requires_grad)
            copy.data = stub(param.shape, held.dtype, held.device)
        self.add(copy, held.subject)
        self._whole.pop()
        other = slot_of(copy)
        if other is not None:
            other.cls, other.bucket.cls, other.bucket.shard = held.cls, held.cls, host_memory(held.shard.numel(), held.dtype)
            other.bucket.shard.copy_(held.shard)
        copy.__class__ = ReleasedParameter
        return copy

    def forget(self, held: HeldParameter) -> None:
        """The parameter is whole and nobody's again; with the last one the communicator ends."""
        param = held._alive()
        held.gather()
        self._heap.freed(param.nbytes)
        self._whole = [p for p in self._whole if p is not param]
        self._members.discard(held)
        del param._zero  # type: ignore[attr-defined]
        if not self._members and self._open is not None:
            (_, close), self._open = self._open, None
            close()


def held_by(param: Tensor) -> HeldParameter | None:
    """The record of a parameter that is cut over the ranks and belongs to no engine yet."""
    slot = slot_of(param)
    return slot.bucket if slot is not None and isinstance(slot.bucket, HeldParameter) else None


@contextlib.contextmanager
def editing(params: list[Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Keeps those of `params` that are held whole inside the context (see `HeldGroup.editing`)."""
    found: dict[HeldGroup, list[HeldParameter]] = {}
    for param in params:
        held = held_by(param)
        if held is not None and held not in found.setdefault(held.group, []):
            found[held.group].append(held)
    with contextlib.ExitStack() as stack:
        for group, members in found.items():
            stack.enter_context(group.editing(sorted(members, key=lambda held: held.index), modifier_rank))
        yield


def claim(params: list[nn.Parameter]) -> None:
    """Gives held parameters all their values and takes them from their group; others stay as they are. Collective."""
    for param in params:
        held = held_by(param)
        if held is not None:
            held.group.forget(held)


def to_device(module: nn.Module, device: torch.device) -> None:
    """`module.to(device)`; released parameters of a group will have their values there when they are gathered. Nothing where all is
    there already: models of quantised weights refuse to be moved."""
    if all(t.device == device for t in (*module.parameters(), *module.buffers())):
        return
    if not any(held_by(p) is not None for p in module.parameters()):
        module.to(device)
        return
    for child in module.modules():
        for p in child._parameters.values():
            held = held_by(p) if p is not None else None
            if held is not None:
                held.move(device)
            elif p is not None:
                p.data = p.data.to(device)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
