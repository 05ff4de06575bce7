"""`offload_states` and `reload_states`: an engine leaves its device for a while, to another that generates, say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zeroengine.config import Config
from zeroengine.engine.mechanism import Mechanism
from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import log_once
from zeroengine.offload.activations import ActivationsOnDisk, ActivationsOnHost
from zeroengine.offload.home import stub
from zeroengine.offload.link import on_host
from zeroengine.offload.parked import Lot, Parked
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.residency import ReleasedParameter, hide, show

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""Optimizer state; fp32 masters apart from the values; values in use (in fp32 training they are the masters); gradients."""

_GRADIENTS = ("lp_grads", "contiguous_grad_buffer")


class OffloadMethods:
    """Methods of `ZeroEngine` that free its device between phases of a program."""

    module: nn.Module
    mechanism: Mechanism
    settings: Config

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False,
        nvme_path: str | None = None,
    ) -> None:  # fmt: skip
        """Moves states off the device: those in `include` (names of `KINDS` or members of an enumeration of these values;
        default: all). `device`: "cpu" or "nvme", which needs `nvme_path` or that of the config. Until `reload_states` every use
        of the engine is an error; what is away already stays there. Between steps only. `non_blocking` is accepted; copies are complete on
        return. Collective.

        On a run whose device is the CPU, "cpu" frees nothing. Raises `ConfigError`, `ModelError`, and `OffloadError` on all ranks.
        """
        kinds = _names(include)
        tier = str(getattr(device, "value", device))
        mechanism, placement = self.mechanism, self.mechanism.placement
        if _is_away(placement.parked, kinds, tier):
            return
        placement.check_here()
        if mechanism.reducer.unfinished:
            raise ModelError("offload_states between backward and step would lose gradients; call it after engine.step()")
        folder = nvme_path or self._nvme_path()
        if tier not in ("cpu", "nvme") or (tier == "nvme" and not folder):
            raise ConfigError(f"offload_states: device is {tier!r}; it is 'cpu', or 'nvme' with nvme_path=...")
        if tier == "cpu" and placement.device.type == "cpu":
            log_once("offload_states: the device of this run is the CPU, so nothing is freed; device='nvme' moves states to a disk")
        mechanism.sharder.release_all()
        if mechanism.optimizer is not None:
            mechanism.optimizer.settle()
        parked = Parked(kinds, tier)
        with placement.faults.kept():
            if tier == "nvme":
                parked.open(placement.folder(str(folder)), placement.io())
            for subject, kind, tensors, put_back in _lots(mechanism, kinds):
                away = [t for t in tensors if tier == "nvme" or t.device.type != "cpu"]
                if away:
                    parked.add(Lot(subject, kind, away, put_back), lambda t: on_host(t.view(-1), pin_memory).view(t.shape))
        placement.parked = parked
        if placement.faults.first is not None:
            parked.failed = str(placement.faults.first)
        for pool in mechanism.pools:
            pool.clear()
        if any(kind in kinds for kind in _GRADIENTS):
            for g in mechanism.gradients:
                g.free()
        _hide_values(mechanism, parked)
        placement.faults.agree(
            placement.everyone or mechanism.groups.control, "offload_states", "Call engine.reload_states() to go on without"
        )

    def offload_activations(
        self, device: Any = "cpu", nvme_path: str | None = None, least_bytes: int = 1 << 20, buffer_count: int = 4,
        pin_memory: bool = True,
    ) -> contextlib.AbstractContextManager[None]:  # fmt: skip
        """Context for forward: what autograd saves in it, `least_bytes` and larger, waits for backward on the host ("cpu") or on a
        disk ("nvme", with `nvme_path` or that of the config), through `buffer_count` host buffers. Weights stay. Around segments
        recomputed by `torch.utils.checkpoint(..., use_reentrant=True)` it moves their inputs. On a run whose device is the CPU,
        "cpu" moves nothing. Raises `ConfigError`; `OffloadError` where the disk fails, then or in backward."""
        tier = str(getattr(device, "value", device))
        folder, placement = nvme_path or self._nvme_path(), self.mechanism.placement
        keep: list[Tensor] = [p for p in self.module.parameters() if not isinstance(p, ReleasedParameter)]
        keep += [b.full for b in self.mechanism.buckets if b.full is not None]
        if tier == "cpu":
            return ActivationsOnHost(keep, least_bytes, pin_memory) if placement.device.type != "cpu" else contextlib.nullcontext()
        if tier != "nvme" or not folder:
            raise ConfigError(f"offload_activations: device is {tier!r}; it is 'cpu', or 'nvme' with nvme_path=...")
        return ActivationsOnDisk(placement.activation_store(folder, buffer_count, pin_memory), keep, least_bytes)

    def _nvme_path(self) -> str | None:
        zero = self.settings.zero_optimization
        return zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what `offload_states` moved; nothing if it did not. Raises `OffloadError` on all ranks. Collective."""
        placement = self.mechanism.placement
        parked = placement.parked
        if parked is None:
            return
        with placement.faults.kept():
            parked.bring_back()
        ranks = placement.everyone or self.mechanism.groups.control
        placement.faults.agree(ranks, "reload_states", "Load the last checkpoint in a new process to go on")
        placement.parked = None


def _names(include: Iterable[Any] | None) -> frozenset[str]:
    names = frozenset(KINDS) if include is None else frozenset(str(getattr(x, "value", x)) for x in include)
    if unknown := sorted(names - set(KINDS)):
        raise ConfigError(f"offload_states: include names {unknown}; known are {', '.join(KINDS)}")
    return names


def _is_away(parked: Parked | None, kinds: frozenset[str], tier: str) -> bool:
    """Whether all of `kinds` are on `tier` already."""
    return parked is not None and parked.failed is None and kinds <= parked.kinds and tier == parked.tier


_Lots = Iterator[tuple[str, str, list[Tensor], Callable[[], None]]]


def _lots(mechanism: Mechanism, kinds: frozenset[str]) -> _Lots:
    """(subject, kind in the memory report, tensors that hold the memory, what follows when they are back)."""
    if "lp_params" in kinds:
        for bucket in mechanism.buckets:
            if bucket.home.in_memory:
                tensors = [bucket.shard] if bucket.policy.shard_params or bucket.full is None else [bucket.full]
                yield f"values of {bucket.subject}", "parameters", tensors, _Show(mechanism, bucket)
    optimizer = mechanism.optimizer
    if optimizer is None:
        return
    for master in optimizer.masters:
        if not master.home.in_memory:
            continue
        if "hp_params" in kinds and master.separate:
            yield f"masters of {master.bucket.subject}", "optimizer", [master.flat], master.repoint
        if "optim_states" in kinds:
            state = [t for view in master.views() for t in optimizer.state_of(view)]
            yield f"optimizer state of {master.bucket.subject}", "optimizer", state, _nothing
    if "optim_states" in kinds and optimizer.parts.whole is not None:
        for view, spec in optimizer.parts.whole.owned():
            yield f"optimizer state of {spec.name}", "optimizer", optimizer.state_of(view), _nothing


def _nothing() -> None:
    return


@dataclass(frozen=True)
class _Show:
    """Makes parameters, and the masters that are views of the values, what they were."""

    mechanism: Mechanism
    bucket: Bucket

    def __call__(self) -> None:
        bucket, optimizer = self.bucket, self.mechanism.optimizer
        if not bucket.policy.shard_params and bucket.full is not None:
            bucket.shard.data = bucket.full[bucket.own]
            show(bucket.params, bucket.views(bucket.full))
            for p in bucket.params:
                p.__class__ = p._zero.cls  # type: ignore[attr-defined]
        bucket.forget_edit()
        for master in optimizer.masters if isinstance(optimizer, ZeroOptimizer) else []:
            if master.bucket is bucket and not master.separate:
                master.repoint()


def _hide_values(mechanism: Mechanism, parked: Parked) -> None:
    """Parameters whose values are gone say so when they are used; tensors that were views of them have none."""
    gone = {id(t) for lot in parked.lots for t in lot.tensors}
    for bucket in mechanism.buckets:
        if id(bucket.full) in gone:
            hide(bucket.params)
            bucket.shard.data = stub(bucket.shard.shape, bucket.dtype, bucket.device)
    optimizer = mechanism.optimizer
    for master in optimizer.masters if optimizer is not None else []:
        base = master.flat if master.separate or id(master.flat) in gone else master.bucket.full
        if id(base) in gone:
            master.repoint()
