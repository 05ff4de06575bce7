"""Which key of a checkpoint fills which memory of the engine, and whether it fits at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.engine import pieces as state
from zeroengine.engine.mechanism import Mechanism
from zeroengine.engine.pieces import Pieces
from zeroengine.errors import CheckpointError
from zeroengine.logging import log_rank0
from zeroengine.optim.optimizer import ZeroOptimizer

Index = dict[str, tuple[torch.Size, torch.dtype]]
_SHOWN = 10  # names in a message


@dataclass(frozen=True)
class LoadPlan:
    """Which key of a checkpoint fills which memory. `wanted` maps its keys to this rank's pieces; `served` names parameters
    that are filled from another key than `model.<name>`; `finish` makes values, masters and ranks agree afterwards."""

    wanted: Pieces
    served: frozenset[str]
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


def plan_load(module: nn.Module, mechanism: Mechanism, index: Index) -> LoadPlan:
    """Every value comes from the most precise copy in the checkpoint: a master, or the weights where there is none."""
    wanted: Pieces = {}
    served: set[str] = set()
    after: list[Callable[[], object]] = []

    def source(name: str, wide: bool) -> str:
        if wide and f"master.{name}" in index:
            served.add(name)
            return f"master.{name}"
        return f"model.{name}"

    separate: set[str] = set()
    for master in mechanism.optimizer.masters if mechanism.optimizer is not None else []:
        if master.separate:
            separate |= {spec.name for spec in master.bucket.layout.specs}
            after.append(master.write_values)
    for key, parts in (state.master_pieces(mechanism.optimizer) if mechanism.optimizer is not None else {}).items():
        wanted[source(key.removeprefix("master."), wide=True)] = parts
    widths = {spec.name: b.dtype.itemsize for b in mechanism.buckets for spec in b.layout.specs}
    for key, parts in state.model_pieces(module, mechanism).items():
        name = key.removeprefix("model.")
        if name not in separate:
            saved = index[key][1].itemsize if key in index else 0
            wanted[source(name, wide=widths.get(name, 0) > saved)] = parts
    for name, b in state.persistent_buffers(module):
        if not b.is_contiguous():
            after.append(lambda b=b, flat=wanted[f"model.{name}"][0].data: b.copy_(flat.view(b.shape)))  # type: ignore[misc]
    return LoadPlan(wanted, frozenset(served), tuple(after))


class Verdict:
    """Refuses a checkpoint that does not fit, on all ranks alike and before anything is changed. `optimizer` is the name of
    its class, None if no state is wanted. Afterwards `without` names the parameters that had no optimizer state."""

    def __init__(self, found: Path, plan: LoadPlan, index: Index, module: nn.Module, strict: bool, optimizer: str | None) -> None:
        self.found, self.plan, self.strict, self.optimizer = found, plan, strict, optimizer
        self.frozen = {f"model.{n}" for n, p in module.named_parameters() if not p.requires_grad}
        self.saved: dict[str, set[str]] = {}
        for key in index:
            if key.startswith("optim."):
                name, _, what = key.removeprefix("optim.").rpartition(".")
                self.saved.setdefault(name, set()).add(what)
        self.without: frozenset[str] = frozenset()

    def __call__(self, missing: tuple[str, ...], unexpected: tuple[str, ...], values: dict[str, Any]) -> None:
        self._weights([k for k in missing if not k.startswith("optim.")], [k for k in unexpected if k.startswith("model.")])
        if self.optimizer is not None:
            self._state([k for k in missing if k.startswith("optim.")], values)
            unused = [k for k in unexpected if k.startswith("optim.")]
            if unused:
                log_rank0(f"{self.optimizer} does not use this state in {self.found}: {_names(unused)}", 30)

    def _weights(self, missing: list[str], unexpected: list[str]) -> None:
        unexpected = [k for k in unexpected if k.removeprefix("model.") not in self.plan.served]
        frozen = [k for k in missing if k in self.frozen]
        lost = [k for k in missing if k not in self.frozen]
        if frozen:
            log_rank0(f"{self.found} was saved without frozen parameters: {len(frozen)} keep their values ({_names(frozen)})")
        told = [f"{what} keys: {_names(keys)}" for what, keys in (("missing", lost), ("unexpected", unexpected)) if keys]
        if told and self.strict:
            raise CheckpointError(
                f"{self.found} does not fit the model; {'; '.join(told)} (load_module_strict=False goes on without them)"
            )
        if told:
            log_rank0(f"{self.found} does not fit the model; {'; '.join(told)}", 30)

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
                + (f"{_names(partly)}; it holds {held}" if partly else kept_none)
                + ". Use the optimizer it was saved with, or load_optimizer_states=False to train on from its weights"
            )
        self.without = frozenset(lacking)


def class_name(optimizer: ZeroOptimizer | None) -> str | None:
    """Name of the class that updates, by which a checkpoint knows it."""
    return None if optimizer is None else type(optimizer.optimizer).__name__


def _names(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN])
    return shown if len(keys) <= _SHOWN else f"{shown} and {len(keys) - _SHOWN} more"
