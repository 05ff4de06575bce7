"""Which key of a checkpoint fills which memory of the engine, and whether it fits at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.checkpoint import Comparison
from zeroengine.engine import pieces as state
from zeroengine.engine.mechanism import Mechanism
from zeroengine.engine.parallel import place_parts
from zeroengine.engine.pieces import Pieces
from zeroengine.errors import CheckpointError
from zeroengine.logging import log_rank0, warn_rank0
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.wording import listed

Index = dict[str, tuple[torch.Size, torch.dtype]]
_SHOWN = 10  # names in a message


@dataclass(frozen=True)
class LoadPlan:
    """Which key of a checkpoint fills which memory. `wanted` maps its keys to this rank's pieces; those of frozen parameters
    are `optional`; `finish` makes values, masters and ranks agree afterwards."""

    wanted: Pieces
    optional: frozenset[str]
    after: tuple[Callable[[], object], ...]

    def finish(self, mechanism: Mechanism) -> None:
        """Collective."""
        for action in self.after:
            action()
        for bucket in mechanism.buckets:
            bucket.publish()
        for bucket in mechanism.buckets:
            bucket.wait()
        if mechanism.optimizer is not None:
            mechanism.optimizer.refresh_masters()


def plan_load(module: nn.Module, mechanism: Mechanism, index: Index, saved_name: Callable[[str], str]) -> LoadPlan:
    """Every value comes from the most precise copy in the checkpoint: a master, or the weights where there is none.
    `saved_name` gives the checkpoint's name of a parameter or buffer."""
    wanted: Pieces = {}
    after: list[Callable[[], object]] = []

    def source(name: str, wide: bool) -> str:
        saved = saved_name(name)
        return f"master.{saved}" if wide and f"master.{saved}" in index else f"model.{saved}"

    separate: set[str] = set()
    for master in mechanism.optimizer.masters if mechanism.optimizer is not None else []:
        if master.separate:
            separate |= {spec.name for spec in master.bucket.layout.specs}
            after.append(functools.partial(master.settle, written=False))
    for key, parts in (state.master_pieces(mechanism.optimizer) if mechanism.optimizer is not None else {}).items():
        wanted[source(key.removeprefix("master."), wide=True)] = parts
    widths = {spec.name: b.dtype.itemsize for b in mechanism.buckets for spec in b.layout.specs}
    for key, parts in state.model_pieces(module, mechanism).items():
        name = key.removeprefix("model.")
        if name not in separate:
            weights = source(name, wide=False)
            saved = index[weights][1].itemsize if weights in index else 0
            wanted[source(name, wide=widths.get(name, 0) > saved)] = parts
    for name, b in state.persistent_buffers(module):
        if not b.is_contiguous():
            flat = wanted[source(name, wide=False)][0].data
            after.append(lambda b=b, flat=flat: b.copy_(flat.view(b.shape)))  # type: ignore[misc]
    frozen = frozenset(f"model.{saved_name(n)}" for n, p in module.named_parameters() if not p.requires_grad)
    return LoadPlan(place_parts(wanted, module), frozen, tuple(after))


class Verdict:
    """Refuses a checkpoint that does not fit, on all ranks alike and before anything is changed. `optimizer` is the name of
    its class, None if no state is wanted. Afterwards `without` names the parameters that had no optimizer state."""

    KINDS = ("model.", "master.", "optim.")
    """Keys that it must hear of when nobody wants them."""

    def __init__(self, found: Path, index: Index, strict: bool, optimizer: str | None) -> None:
        self.found, self.strict, self.optimizer = found, strict, optimizer
        self.masters = {key for key in index if key.startswith("master.")}
        self.saved: dict[str, set[str]] = {}
        for key in index:
            if key.startswith("optim."):
                name, _, what = key.removeprefix("optim.").rpartition(".")
                self.saved.setdefault(name, set()).add(what)
        self.without: frozenset[str] = frozenset()

    def __call__(self, found: Comparison) -> None:
        # A weight that nobody wants was not needed if its master, the more precise copy, is.
        served = {key.replace("master.", "model.", 1) for key in self.masters.difference(found.unexpected)}
        unknown = [k for k in found.unexpected if k.startswith("model.") and k not in served]
        self._weights([k for k in found.missing if not k.startswith("optim.")], found.excused, unknown)
        if self.optimizer is not None:
            self._state([k for k in found.missing if k.startswith("optim.")], found.values)
            unused = [k for k in found.unexpected if k.startswith("optim.")]
            if unused:
                warn_rank0(f"{self.optimizer} does not use this state in {self.found}: {listed(unused, _SHOWN)}")

    def _weights(self, missing: Sequence[str], frozen: Sequence[str], unexpected: Sequence[str]) -> None:
        if frozen:
            log_rank0(f"{self.found} was saved without frozen parameters: {len(frozen)} keep their values ({listed(frozen, _SHOWN)})")
        told = [f"{what} keys: {listed(keys, _SHOWN)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
        if told and self.strict:
            raise CheckpointError(f"{self.found} does not fit the model; {'; '.join(told)} (load_module_strict=False goes on without them)")
        if told:
            warn_rank0(f"{self.found} does not fit the model; {'; '.join(told)}")

    def _state(self, missing: list[str], values: dict[str, Any]) -> None:
        saved_by = values.get("optimizer")
        # Before the first update there is no state yet, and that is what a resume gets.
        unused = saved_by == self.optimizer and values.get("global_steps") == values.get("skipped_steps")
        lacking: dict[str, set[str]] = {}
        for key in missing:
            name, _, what = key.removeprefix("optim.").rpartition(".")
            lacking.setdefault(name, set()).add(what)
        partly = [f"{n} has no {', '.join(sorted(kinds))}" for n, kinds in lacking.items() if n in self.saved]
        if partly or (lacking and not self.saved and not unused):
            held = ", ".join(sorted(set().union(*self.saved.values())))
            kept_none = f"it was saved by {saved_by or 'no optimizer'}, which kept none"
            raise CheckpointError(
                f"{self.found} has no optimizer state for {self.optimizer}: "
                + (f"{listed(partly, _SHOWN)}; it holds {held}" if partly else kept_none)
                + ". Use the optimizer it was saved with, or load_optimizer_states=False to train on from its weights"
            )
        self.without = frozenset(lacking)


def class_name(optimizer: ZeroOptimizer | None) -> str | None:
    """Name of the class that updates, by which a checkpoint knows it."""
    return None if optimizer is None else type(optimizer.optimizer).__name__
