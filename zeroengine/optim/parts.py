"""From a user's parameter groups to what this rank's torch optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.errors import ConfigError
from zeroengine.logging import log_once
from zeroengine.ops.optimizer import FusedOptimizer
from zeroengine.optim.kinds import check_usable, is_elementwise, sees_matrices, steps_apart
from zeroengine.optim.state import carry_state, check_fresh
from zeroengine.optim.update import FlatMaster
from zeroengine.optim.whole import WholeUpdate
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.experts import expert_part, is_elsewhere, is_stack
from zeroengine.zero.gradients import BucketGradients
from zeroengine.zero.residency import slot_of
from zeroengine.zero.tensor import tensor_shard

Groups = Sequence[Mapping[str, Any]]
Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Parts:
    """What of each parameter this rank updates: flat parts of the masters, or whole parameters that it owns."""

    def __init__(
        self, gradients: list[BucketGradients], masters: dict[int, Tensor], cls: type[torch.optim.Optimizer], groups: Groups
    ) -> None:
        """`masters`: fp32 values of 16-bit buckets by index, taken out of the dict."""
        self._cls = cls
        self._taken: dict[int, str] = {}
        self.whole: WholeUpdate | None = None
        chosen = self._choose(groups)
        self.masters = [FlatMaster(g, masters.pop(g.bucket.index, None), not issubclass(cls, FusedOptimizer)) for g in gradients]
        self._by_bucket = {m.bucket.index: m for m in self.masters}
        self._sharded = any(g.bucket.policy.shard_state for g in gradients)
        self._add_whole(chosen)
        if self.whole is not None and not _is_known(cls):
            log_once(
                f"optimizer {cls.__name__} is not known to update each element by itself: every rank updates whole parameters, "
                "which is right and moves more bytes; a class attribute `elementwise = True` gives it slices"
            )

    def take(self, groups: Groups) -> list[list[nn.Parameter]]:
        """For each group, what this rank's optimizer updates of its parameters. Raises `ConfigError` for a parameter that
        is in two groups or of another model."""
        result = []
        for g, group in enumerate(groups):
            parts: list[nn.Parameter] = []
            for p in group["params"]:
                found = self._place(p, g)
                if found is None:
                    continue
                bucket, index, name = found
                label = str(group.get("name", g))
                if id(p) in self._taken:
                    both = f"{self._taken[id(p)]} and {label}"
                    raise ConfigError(f"parameter '{name}' is in parameter groups {both}; put it in one")
                self._taken[id(p)] = label
                parts.extend(self.of(bucket, index))
            result.append(parts)
        return result

    def of(self, bucket: int, index: int) -> list[nn.Parameter]:
        """What this rank updates of parameter `index` of a bucket."""
        if self.whole is not None and self.whole.holds(bucket, index):
            view = self.whole.view(bucket, index)
            return [] if view is None else [view]
        master = self._by_bucket.get(bucket)
        return [] if master is None else [part.view for part in master.parts.get(index, [])]

    def add(self, group: Mapping[str, Any]) -> list[nn.Parameter]:
        """`take` for a group that is added while the engine runs."""
        for p in group["params"]:
            slot = slot_of(p)
            if slot is None or not slot.bucket.trainable:
                name = "?" if slot is None else slot.name
                raise ConfigError(
                    f"parameter '{name}' of shape {tuple(p.shape)} was frozen or not there when the engine was made, so it has "
                    "no gradient here; call engine.destroy() and zeroengine.initialize with it"
                )
            if id(p) in self._taken:
                raise ConfigError(f"parameter '{slot.name}' is in parameter group {self._taken[id(p)]} already; give it in one group only")
        self._add_whole(self._choose([group]))
        return self.take([group])[0]

    def _choose(self, groups: Groups) -> dict[int, frozenset[int]]:
        """By bucket, the parameters that are updated whole."""
        chosen: dict[int, set[int]] = {}
        for g, group in enumerate(groups):
            if is_elementwise(self._cls, group):
                continue
            for p in group["params"]:
                found = self._place(p, g)
                if found is None:
                    continue
                part = expert_part(p)
                by_matrix = sees_matrices(self._cls) and is_stack(p) and p.dim() > 2
                if part is not None and part.stacked and not by_matrix:
                    raise ConfigError(
                        f"optimizer {self._cls.__name__} looks at whole parameters, and mesh.ep gives each rank a part of '{found[2]}'; "
                        "use an optimizer that updates each element by itself (Adam, AdamW, SGD, ...), or make the experts modules of "
                        "their own (zeroengine.moe.ExpertList)"
                    )
                chosen.setdefault(found[0], set()).add(found[1])
        return {bucket: frozenset(indices) for bucket, indices in chosen.items()}

    def _add_whole(self, chosen: dict[int, frozenset[int]]) -> None:
        for bucket, indices in chosen.items():
            if bucket in self._by_bucket:
                self._by_bucket[bucket].widen(indices)
        if not self._sharded or not chosen:
            return
        if self.whole is None:
            # as much at once as the mechanism holds of values and gradients
            size = max(m.bucket.layout.padded for m in self.masters)
            self.whole = WholeUpdate(not steps_apart(self._cls), size)
        self.whole.add([(self._by_bucket[b], i) for b in sorted(chosen) for i in sorted(chosen[b]) if b in self._by_bucket])

    def _place(self, p: Tensor, group: int) -> tuple[int, int, str] | None:
        """(bucket, index, name); None for a parameter without elements, frozen, or of an expert of another rank."""
        slot = slot_of(p)
        if slot is not None and isinstance(slot.bucket, Bucket):
            return slot.bucket.index, slot.index, slot.name
        if not p.requires_grad or not p.numel() or is_elsewhere(p):
            return None
        raise ConfigError(
            f"parameter group {group} has a tensor of shape {tuple(p.shape)} that is not a parameter of the model given "
            "to zeroengine.initialize; build the groups from that model's parameters"
        )


@dataclass
class Attached:
    """A torch optimizer over this rank's parts, and what feeds it."""

    inner: torch.optim.Optimizer
    parts: Parts
    prepare: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None

    def add_group(self, group: dict[str, Any]) -> None:
        """A group of parameters that are in none so far."""
        for each in [group] if self.prepare is None else self.prepare([group]):
            self.inner.add_param_group({**each, "params": self.parts.add(each)})


def attach(
    source: torch.optim.Optimizer | Build, groups: list[dict[str, Any]], gradients: list[BucketGradients],
    masters: dict[int, Tensor],
) -> Attached:  # fmt: skip
    """The user's optimizer, or one that `source` builds over groups, with this rank's parts in place of the model's
    parameters.

    A factory with an attribute `cls` says what it builds and is called with the parts; its `prepare(groups)`, if it has
    one, rearranges the groups first. Any other callable is called with the groups themselves, as outside an engine.
    """
    cls: type[torch.optim.Optimizer] | None = getattr(source, "cls", None)
    if cls is not None and not isinstance(source, torch.optim.Optimizer):
        check_usable(cls)
        prepare = getattr(source, "prepare", None)
        groups = groups if prepare is None else prepare(groups)
        parts = Parts(gradients, masters, cls, groups)
        inner = source([{**group, "params": mine} for group, mine in zip(groups, parts.take(groups), strict=True)])
        return Attached(inner, parts, prepare)
    inner = source if isinstance(source, torch.optim.Optimizer) else _call(source, groups)
    check_usable(type(inner))
    check_fresh(inner)
    parts = Parts(gradients, masters, type(inner), inner.param_groups)
    _replace(inner, parts)
    return Attached(inner, parts)


def _call(source: Build, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if isinstance(source, type) and issubclass(source, torch.optim.Optimizer):
        check_usable(source)
    inner = source([dict(group) for group in groups])
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer function returned a {type(inner).__name__}; it must return a torch optimizer")
    return inner


def _replace(inner: torch.optim.Optimizer, parts: Parts) -> None:
    """Exchanges the model's parameters in `inner`, and the keys of the state that its constructor made."""
    before = [list(group["params"]) for group in inner.param_groups]
    after = parts.take(inner.param_groups)
    made = dict(inner.state)
    inner.state.clear()
    for params in before:
        for p in params:
            slot = slot_of(p)
            if p in made and slot is not None:
                shard = tensor_shard(p)  # the constructor saw the whole parameter
                state = made[p] if shard is None else shard.cut_state(made[p], p.shape)
                carry_state(inner, state, p.shape, parts.of(slot.bucket.index, slot.index), _starts(parts, slot))
    for group, mine in zip(inner.param_groups, after, strict=True):
        group["params"] = mine
        group.pop("param_names", None)  # one name for each parameter, and there may be more parts or fewer


def _starts(parts: Parts, slot: Any) -> list[int]:
    master = parts._by_bucket[slot.bucket.index]
    if parts.whole is not None and parts.whole.holds(slot.bucket.index, slot.index):
        return [0]
    return [part.start for part in master.parts.get(slot.index, [])]


def _is_known(cls: type[torch.optim.Optimizer]) -> bool:
    return cls.__module__.startswith(("torch.optim", "zeroengine.")) or hasattr(cls, "elementwise")
