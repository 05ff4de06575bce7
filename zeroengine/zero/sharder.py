"""Buckets of one model, and the hooks that bring values when modules run and when backward reads them.

Forward: every module that directly owns sharded parameters is a unit. Its pre-hook gathers its buckets and pins them, its
post-hook unpins. Values that autograd saves meanwhile are saved as `SavedSlice`s, which backward turns back into tensors
by gathering the bucket again. What may be released is decided at the next use of a bucket by `GatherWindow`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroengine.errors import ModelError, ReleasedParameterError
from zeroengine.offload.home import at_hand
from zeroengine.zero.bucket import Bucket, Residency
from zeroengine.zero.compiled import AroundCompiled, compiled_modules, is_wrapper
from zeroengine.zero.frozen import forget_frozen
from zeroengine.zero.hooks import ModuleHook, in_backward
from zeroengine.zero.residency import ReleasedParameter, activate, deactivate, slot_of
from zeroengine.zero.saved import SavedValues
from zeroengine.zero.window import GatherWindow

GatherUnit = list[Bucket]
"""Buckets that are gathered and released together: one, or all those of a leaf of `leaves.py`."""


def gather_units(buckets: list[Bucket], leaves: dict[str, list[int]]) -> list[GatherUnit]:
    """Units in order of their first bucket. `leaves`: indices of the buckets that belong together."""
    together = {i: members for members in leaves.values() for i in members}
    return [[buckets[i] for i in together.get(b.index, [b.index])] for b in buckets if b.index == together.get(b.index, [b.index])[0]]


def _gathered(unit: GatherUnit) -> bool:
    return any(b.residency is not Residency.RELEASED for b in unit)


def _pinned(unit: GatherUnit) -> bool:
    return any(b.pins for b in unit)


@dataclass
class _Unit:
    """A module that owns sharded parameters itself, and their buckets; `leaf` is one of the leaf that it holds."""

    params: list[nn.Parameter]
    buckets: list[Bucket]
    leaf: Bucket | None = None


@dataclass
class _Frame:
    """One running unit: what it pinned, and how to take its saved-tensor hooks off."""

    module: nn.Module
    active: list[nn.Parameter]
    pinned: list[Bucket]
    hooks: contextlib.ExitStack
    leaf: Bucket | None


class Sharder:
    """Owns the buckets whose values are sharded and the hooks on `module`."""

    def __init__(self, module: nn.Module, buckets: list[Bucket], window: GatherWindow, leaves: dict[str, list[int]] | None = None) -> None:
        self.module = module
        self.buckets = buckets
        self._window = window
        self._leaves = leaves or {}
        self._units = gather_units(buckets, self._leaves)
        self._unit_of = {bucket.index: i for i, unit in enumerate(self._units) for bucket in unit}
        self._far = any(not b.home.in_memory for b in buckets)
        self._live: set[int] = set()  # units that may be gathered
        self._last: tuple[str, int] | None = None  # the use before: phase and unit
        self._saved = SavedValues(len(buckets))
        self._frames: list[_Frame] = []
        self._handles: list[Any] = []
        self._compiled: frozenset[nn.Module] = frozenset()
        self._backward_running = False
        self.optimizer: Any = None  # what updates the buckets, for those who come from a parameter
        self.on_edit: Callable[[Bucket], None] | None = None  # makes the masters follow an edit (the optimizer's)
        for bucket in buckets:
            for p in bucket.params:
                slot = slot_of(p)
                if slot is not None:
                    slot.source = self
        if any(b.policy.shard_params for b in buckets):
            self._install()

    # --- uses ---------------------------------------------------------------------------------------------------

    def use(self, bucket: Bucket) -> None:
        """Makes the values of `bucket` whole now; releases and fetches others as the window says."""
        if not bucket.policy.shard_params:
            return
        phase = self._phase()
        index = self._unit_of[bucket.index]
        unit = self._units[index]
        # Ranks may use other parts of a unit in another number, and must take the same decisions all the same.
        if all(b.residency is Residency.WHOLE for b in unit) and (self._last == (phase, index) or _pinned(unit)):
            return
        self._last = phase, index
        keep, fetch = self._window.visit(phase, index, lambda i: _gathered(self._units[i]))
        for i in sorted(self._live - keep):  # few: a look at every unit at every use would cost more than small layers compute
            if not _pinned(self._units[i]):
                self._live.discard(i)
                for b in self._units[i]:
                    b.release()
        self._live.update((index, *fetch))
        for b in (*unit, *(b for i in fetch for b in self._units[i])):
            b.gather()
        for b in unit:
            b.wait()
            self._saved.remember(b)
        if self._far:
            self._read_ahead(phase)

    def _read_ahead(self, phase: str) -> None:
        """What lives on a disk and is used after what is gathered already comes into host memory."""
        for i in self._window.upcoming(phase):
            for b in self._units[i]:
                if b.residency is Residency.RELEASED:
                    b.home.ahead()

    def edited(self, bucket: Bucket) -> None:
        """The gathered values of `bucket` were changed, equally on all ranks: they become the truth."""
        if bucket.full is not None and bucket.policy.shard_params:
            bucket.store(bucket.full)
        bucket.version += 1
        bucket.forget_edit()
        if self.on_edit is not None:
            self.on_edit(bucket)

    def drop_edits(self, buckets: list[Bucket]) -> None:
        """What was written into gathered values of `buckets` is given up."""
        for bucket in buckets:
            if bucket.full is not None and bucket.policy.shard_params:
                with at_hand(bucket.home, changed=False):
                    bucket.full[bucket.own].copy_(bucket.shard)
                bucket.forget_edit()

    def release_all(self) -> None:
        """Releases everything that nobody has pinned."""
        for bucket in self.buckets:
            if not bucket.pins:
                bucket.release()

    def end_backward(self) -> None:
        """The backward pass is over: what it gathered goes, unless a module is running."""
        self._backward_running = False
        if not self._frames:
            self.release_all()

    def verify(self) -> None:
        """Raises `ModelError` if the model is not any more what was laid into buckets: an update would be lost."""
        waiting = [self.module]
        while waiting:  # `named_parameters` makes a name for each, at every step
            module = waiting.pop()
            waiting.extend(m for m in module._modules.values() if m is not None)
            for p in module._parameters.values():
                what = None if p is None else _change_of(p)
                if what is not None:
                    name = next(n for n, q in self.module.named_parameters() if q is p)
                    raise ModelError(
                        f"parameter '{name}' {what}, and would not be trained; change the model before zeroengine.initialize, "
                        "or call engine.destroy() and initialize it again"
                    )

    @contextlib.contextmanager
    def gathered(self, buckets: list[Bucket]) -> Iterator[None]:
        """Keeps the values of `buckets` whole inside the context. Collective."""
        for b in buckets:
            b.placement.check_here()
        buckets = [b for b in buckets if b.policy.shard_params]
        for b in buckets:
            self._live.add(self._unit_of[b.index])
            b.gather()
            b.pins += 1
        active: list[nn.Parameter] = []
        try:
            for b in buckets:
                b.wait()
                self._saved.remember(b)
                for p in b.params:
                    activate(p)
                    active.append(p)
            yield
        finally:
            for p in active:
                deactivate(p)
            for b in buckets:
                b.pins -= 1
            if not self._frames:
                for b in buckets:
                    if not b.pins:
                        b.release()

    def _phase(self) -> str:
        if in_backward():
            if not self._backward_running:
                self._backward_running = True
                self._last = None
                self._window.restart("backward")
            return "backward"
        return "train" if torch.is_grad_enabled() else "eval"

    # --- ValueSource (residency.py) -------------------------------------------------------------------------------

    def computing(self) -> bool:
        return bool(self._frames) or in_backward()

    @contextlib.contextmanager
    def using(self, param: ReleasedParameter, function: str) -> Iterator[None]:
        slot = slot_of(param)
        if slot is None:
            yield
            return
        bucket: Bucket = slot.bucket
        bucket.placement.check_here()
        if not self._frames and not in_backward():
            raise ReleasedParameterError(
                f"parameter '{slot.name}' is sharded and its values are not gathered here ({function}). Read or edit it "
                "inside `with zeroengine.zero.GatheredParameters([param]):`, save weights with "
                "`engine.save_checkpoint`, `engine.save_16bit_model` or `engine.full_state_dict()`"
            )
        self.use(bucket)
        if self._frames and bucket not in self._frames[-1].pinned:
            bucket.pins += 1
            self._frames[-1].pinned.append(bucket)
        bucket.pins += 1  # an operation in backward has no frame, and may read another bucket as well
        try:
            with self._saved.saving_alone(self.use):
                yield
        finally:
            bucket.pins -= 1

    def write(self, param: ReleasedParameter, values: Tensor) -> bool:
        slot = slot_of(param)
        if slot is None or self._frames or in_backward() or torch.is_grad_enabled():
            return False
        bucket: Bucket = slot.bucket
        bucket.placement.check_here()
        bucket.release()
        bucket.write(slot.index, values)
        return True

    # --- hooks --------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        holders = self._holders()
        self._compiled = compiled = self._check_compiled()
        inside = {m for c in compiled for m in c.modules() if m is not c}
        for module in self.module.modules():
            if module in inside:
                continue
            unit = self._unit_for(module.parameters() if module in compiled else module._parameters.values())
            if module in holders:
                unit.leaf = holders[module]
                members = self._units[self._unit_of[unit.leaf.index]]
                unit.buckets += [b for b in members if b not in unit.buckets]
            # A model inside an adapter is called by itself when it generates: it is where a pass begins, as the whole is.
            begins = module is self.module or callable(getattr(type(module), "generate", None))
            if not unit.buckets and not begins:
                continue
            if module in compiled and not is_wrapper(module):
                self._handles.append(AroundCompiled(module, self._enter(unit), self._leave))
                continue
            self._handles.append(module.register_forward_pre_hook(ModuleHook(self._enter(unit)), prepend=True))
            self._handles.append(module.register_forward_hook(ModuleHook(self._leave), always_call=True))

    def _unit_for(self, params: Iterable[nn.Parameter | None]) -> _Unit:
        unit = _Unit([], [])
        for p in params:
            slot = slot_of(p) if p is not None else None
            if p is not None and slot is not None and slot.bucket.policy.shard_params:
                unit.params.append(p)
                if slot.bucket not in unit.buckets:
                    unit.buckets.append(slot.bucket)
        return unit

    def _check_compiled(self) -> frozenset[nn.Module]:
        """The modules that run compiled. Raises `ModelError` for the model as a whole."""
        found = frozenset(compiled_modules(self.module))
        if self.module in found:
            raise ModelError(
                "the whole model is compiled, and at stage 3 that would gather all of it at once; compile its blocks instead, for "
                "example `for block in model.layers: block.compile()`, or use stage 2"
            )
        return found

    def _follow_compilation(self) -> None:
        """Blocks may be compiled, or not any more, between two passes."""
        if self._compiled != frozenset(compiled_modules(self.module)):
            self._uninstall()
            self._install()

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _holders(self) -> dict[nn.Module, Bucket]:
        """For each leaf the module that gathers it when it runs and keeps it until it is done, whichever parts run: the leaf,
        or what is around a mere list. With one bucket of it."""
        found: dict[nn.Module, Bucket] = {}
        for name, members in self._leaves.items():
            holder = self.module.get_submodule(name)
            while isinstance(holder, (nn.ModuleList, nn.ModuleDict)) and name:
                name = name.rpartition(".")[0]
                holder = self.module.get_submodule(name)
            found[holder] = self.buckets[members[0]]
        return found

    def _enter(self, unit: _Unit) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            if not self._frames and not in_backward():
                self._follow_compilation()
                self._backward_running = False
                self._last = None
                self._window.restart("train" if torch.is_grad_enabled() else "eval")
            frame = _Frame(module, [], [], contextlib.ExitStack(), unit.leaf)
            self._frames.append(frame)
            for bucket in unit.buckets:
                self.use(bucket)
                bucket.pins += 1
                frame.pinned.append(bucket)
            for p in unit.params:
                activate(p)
                frame.active.append(p)
            if unit.buckets and torch.is_grad_enabled():
                frame.hooks.enter_context(self._saved.saving(self.use))

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not any(frame.module is module for frame in self._frames):
            return  # an earlier hook on this module raised, and it never was entered
        # After an exception in a pre-hook or inside, frames of modules further in may be left: drop them as well.
        while self._frames:
            frame = self._frames.pop()
            frame.hooks.close()
            for p in frame.active:
                deactivate(p)
            for bucket in frame.pinned:
                bucket.pins -= 1
            if frame.module is module:
                if frame.leaf is not None:
                    self._gather_in_backward(frame.leaf, output)
                break
        if not self._frames and not in_backward():
            self.release_all()

    def abandon(self) -> None:
        """A forward was broken off: nothing of it goes on."""
        while self._frames:
            self._leave(self._frames[-1].module, (), None)

    def _gather_in_backward(self, bucket: Bucket, output: Any) -> None:
        """Backward of a leaf begins with its gather on every rank, also where no part of it that ran has weights to read."""

        def gather(_: Tensor) -> None:
            if self._handles:
                self.use(bucket)

        for t in tree_leaves(output):
            if isinstance(t, Tensor) and t.requires_grad:
                t.register_hook(gather)

    def remove(self) -> None:
        """Takes all hooks off and gives the parameters their own memory. Collective if values are sharded."""
        self._uninstall()
        self.optimizer = self.on_edit = None
        self._saved.forget()
        for bucket in self.buckets:
            bucket.detach()
        forget_frozen(self.module.parameters())


def _change_of(p: nn.Parameter) -> str | None:
    """What happened to a parameter since it was laid into a bucket, if an update of it would be lost."""
    slot = slot_of(p)
    if slot is None:
        return "requires grad, but was frozen or not there when the engine was made" if p.requires_grad and p.numel() else None
    if not slot.bucket.trainable and p.requires_grad:
        return "was unfrozen after the engine was made"
    if slot.bucket.holds(slot.index):
        return None
    return "was given other memory after the engine was made (half(), to(), an assignment to .data)"
