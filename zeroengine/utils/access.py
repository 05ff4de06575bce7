"""Whole values, gradients and optimizer state of one parameter, wherever its parts lie.

Every function here whose name has `full` is collective over the ranks that train the model: call it on all of them, with
the same parameter, outside forward and backward. `param` is a parameter of the model that an engine trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeroengine.errors import DivergenceError, ModelError
from zeroengine.optim.optimizer import ZeroOptimizer
from zeroengine.optim.update import FlatMaster
from zeroengine.zero.edits import digest
from zeroengine.zero.gathered import GatheredParameters
from zeroengine.zero.residency import Slot, slot_of
from zeroengine.zero.sharder import Sharder
from zeroengine.zero.tensor import TensorShard, tensor_shard, whole_value


@dataclass(frozen=True)
class _Trained:
    """A trained parameter, the flat master that has its part on this rank, and who updates it."""

    slot: Slot
    master: FlatMaster
    optimizer: ZeroOptimizer

    @property
    def shard(self) -> TensorShard | None:
        """The part of the whole parameter that the ranks of a tensor group have one each of."""
        return tensor_shard(self.master.bucket.params[self.slot.index])

    @property
    def held(self) -> int:
        """First element of the bucket's flat buffer that `master.flat` has."""
        bucket = self.master.bucket
        return int(bucket.own.start) if bucket.policy.shard_state else 0

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[None]:
        """Context in which the masters and the state have their values in memory. Raises `OffloadError` on all ranks. Collective
        where a disk is used."""
        placement = self.optimizer.placement
        placement.check_here()
        with contextlib.ExitStack() as stack:
            with placement.faults.kept():
                stack.enter_context(self.master.at_hand(changed=changed))
            placement.agree_on(self.optimizer.control, f"access to {self.slot.name}")
            yield

    def part_of(self, flat: Tensor) -> Tensor:
        """This rank's elements of the parameter in `flat`, which is laid out as `master.flat`: a 1-D view, perhaps empty."""
        spec, start = self.master.bucket.layout.specs[self.slot.index], self.held
        lo, hi = max(spec.offset, start), min(spec.end, start + flat.numel())
        return flat[lo - start : max(lo, hi) - start]

    def part_of_whole(self, value: Tensor) -> Tensor:
        """The same elements of a whole value of the parameter."""
        spec, start = self.master.bucket.layout.specs[self.slot.index], self.held
        lo, hi = max(spec.offset, start), min(spec.end, start + self.master.flat.numel())
        return value.reshape(-1)[lo - spec.offset : max(lo, hi) - spec.offset]

    def whole(self, flat: Tensor, what: str) -> Tensor:
        """The parameter's whole value from all ranks' `flat`. Collective."""
        bucket = self.master.bucket
        spec = bucket.layout.specs[self.slot.index]
        if bucket.policy.shard_state:
            full = torch.empty(bucket.layout.padded, dtype=flat.dtype, device=flat.device)
            bucket.comm.all_gather(full, flat.contiguous(), f"{what} of {spec.name}").wait()
            flat = full
        value = flat[spec.offset : spec.end].view(spec.shape)
        return value.clone() if self.shard is None else self.shard.gather(value, f"{what} of {spec.name}")

    def checked(self, value: Tensor, what: str) -> Tensor:
        """`value` in fp32 on the parameter's device, if it has its shape and is equal on all ranks; of a tensor-parallel one this
        rank's part. Collective."""
        bucket, control = self.master.bucket, self.optimizer.control
        spec, me = bucket.layout.specs[self.slot.index], control.ranks[control.rank]
        shape = spec.shape if self.shard is None else self.shard.whole_shape(spec.shape)
        if value.shape != shape:
            raise ModelError(
                f"rank {me}: {what} of parameter '{spec.name}' has shape {tuple(shape)}, and the value given has {tuple(value.shape)}"
            )
        value = value if self.shard is None else self.shard.cut(value)
        value = value.detach().to(device=bucket.device, dtype=self.master.flat.dtype).contiguous()
        told = bucket.holders.exchange(torch.tensor([digest(value.view(-1))]), f"value for {what} of {spec.name}").flatten()
        if not bool((told == told[0]).all()):
            raise DivergenceError(
                f"rank {me}: the value for {what} of parameter '{spec.name}' is not the same on all ranks; give the same everywhere"
            )
        return value


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """A copy of the parameter's values as the optimizer keeps them: fp32, of its whole shape. Collective. Of a frozen
    parameter, its values in fp32."""
    trained = _find(param)
    if trained is None:
        with GatheredParameters(param):
            value = param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
            return whole_value(param, value, "fp32 values")
    trained.optimizer.follow_edits()
    with trained.at_hand(changed=False):
        return trained.whole(trained.master.flat, "fp32 values")


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Makes `value` (whole shape, equal on all ranks) the parameter's values, in the optimizer and in the model. Collective."""
    trained = _need(param, "fp32 values")
    value = trained.checked(value, "fp32 values")
    trained.optimizer.follow_edits()
    with trained.at_hand(changed=True):
        trained.part_of(trained.master.flat).copy_(trained.part_of_whole(value))
        trained.master.publish(written=False)
    trained.master.bucket.wait()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the parameter's gradient as the next `step` would use it, before clipping: of its whole shape, combined over
    ranks and the micro-batches so far, without the loss scale. None if it has none. Completes reductions that are under
    way. Collective; after backward and before `engine.step`."""
    trained = _find(param)
    if trained is None or not trained.optimizer.reducer.unfinished:
        return None
    used, _ = trained.optimizer.reducer.finish()
    return trained.whole(trained.master.gradients.updated, "gradient") if trained.slot.name in used else None


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Makes `value` (whole shape, equal on all ranks) the combined gradient that the next `step` uses. Collective; after
    backward and before `engine.step`."""
    trained = _need(param, "gradient")
    reducer = trained.optimizer.reducer
    if not reducer.unfinished:
        raise ModelError(
            f"there is no step under way whose gradient of parameter '{trained.slot.name}' could be set; call it after backward"
        )
    value = trained.checked(value, "gradient")
    reducer.finish()
    trained.part_of(trained.master.gradients.updated).copy_(trained.part_of_whole(value))
    reducer.count_as_used(trained.slot.bucket, trained.slot.index)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of what the optimizer keeps for the parameter under the key ("exp_avg", ...), of its whole shape; a number such
    as "step" as it is. None if there is no such state (before the first step). Collective."""
    trained = _find(param)
    if trained is None:
        return None
    with trained.at_hand(changed=False):
        return _full_state(trained, optim_state_key)


def _full_state(trained: _Trained, optim_state_key: str) -> Tensor | None:
    states = _states(trained, optim_state_key)
    scalar = next((float(s) for s in states.values() if s.dim() == 0), 0.0)
    is_scalar = any(s.dim() == 0 for s in states.values())
    facts = torch.tensor([float(bool(states)), float(is_scalar), scalar], dtype=torch.float64)
    comm = trained.master.bucket.comm
    held, scalars, values = comm.exchange(facts, f"{optim_state_key} of {trained.slot.name}").amax(0).tolist()
    if not held:
        return None
    if scalars:
        return torch.tensor(values)
    flat = torch.zeros_like(trained.master.flat)
    for at, state in states.items():
        flat[at : at + state.numel()] = state.reshape(-1)
    return trained.whole(flat, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Makes `value` (whole shape, equal on all ranks) what the optimizer keeps under the key. Collective. Raises `ModelError`
    if there is no such state yet."""
    trained = _need(param, optim_state_key)
    if safe_get_full_optimizer_state(param, optim_state_key) is None:
        raise ModelError(
            f"the optimizer keeps no '{optim_state_key}' for parameter '{trained.slot.name}' (yet): state is made by the first step"
        )
    flat = torch.zeros_like(trained.master.flat)
    trained.part_of(flat).copy_(trained.part_of_whole(trained.checked(value, optim_state_key)))
    with trained.at_hand(changed=True):
        for at, state in _states(trained, optim_state_key).items():
            state.copy_(flat[at : at + state.numel()].view(state.shape))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the optimizer's values, 1-D and perhaps empty: the memory itself, or a copy of values on disk. None
    if it is not trained."""
    trained = _find(param)
    if trained is None:
        return None
    with trained.at_hand(changed=False):
        part = trained.part_of(trained.master.flat)
        return part.clone() if trained.master.away else part


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of what `safe_get_full_grad` gives, 1-D and perhaps empty. Collective."""
    trained = _find(param)
    if trained is None or not trained.optimizer.reducer.unfinished:
        return None
    used, _ = trained.optimizer.reducer.finish()
    return trained.part_of(trained.master.gradients.updated) if trained.slot.name in used else None


def _find(param: nn.Parameter) -> _Trained | None:
    slot = slot_of(param)
    optimizer = slot.source.optimizer if slot is not None and isinstance(slot.source, Sharder) else None
    if slot is None or not isinstance(optimizer, ZeroOptimizer):
        return None
    return next((_Trained(slot, m, optimizer) for m in optimizer.masters if m.bucket is slot.bucket), None)


def _need(param: nn.Parameter, what: str) -> _Trained:
    trained = _find(param)
    if trained is None:
        raise ModelError(
            f"the {what} of a parameter of shape {tuple(param.shape)} cannot be set: no engine trains it (it is frozen, or the "
            "engine has no optimizer)"
        )
    return trained


def _states(trained: _Trained, key: str) -> dict[int, Tensor]:
    """State tensors of this rank's parts of the parameter, by their place in the master's flat buffer."""
    found = {}
    for part in trained.master.parts.get(trained.slot.index, []):
        value = trained.optimizer.state.get(part.view, {}).get(key)
        if isinstance(value, Tensor):
            found[part.at] = value
    return found
