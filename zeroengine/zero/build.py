"""From a model to buckets: checks, casts, the ranks' agreement on the layout, initial values from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.comm.alike import are_alike, first_difference
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import DivergenceError, ModelError
from zeroengine.offload.home import at_hand
from zeroengine.offload.link import on_host
from zeroengine.offload.placement import Placement
from zeroengine.zero.bucket import Bucket, cut_into_buckets
from zeroengine.zero.experts import common_name, expert_part
from zeroengine.zero.frozen import note_frozen
from zeroengine.zero.held import claim, held_by
from zeroengine.zero.holders import Holders
from zeroengine.zero.kept import kept_modules
from zeroengine.zero.layout import BucketLayout
from zeroengine.zero.leaves import find_leaves
from zeroengine.zero.packed import is_packed
from zeroengine.zero.policy import Policy, policy_for
from zeroengine.zero.pool import BufferPool
from zeroengine.zero.residency import slot_of


@dataclass(frozen=True)
class ShardingRule:
    """How a model is cut. Sizes in elements."""

    stage: int
    dtype: torch.dtype | None  # of floating-point parameters and buffers; None keeps what the model has
    bucket_size: int
    persistence_threshold: int = 0  # parameters below it keep their values whole on every rank
    part: Callable[[str], str] | None = None  # parameters, by name, of different parts never share a bucket
    leaf_module: Mapping[str, Any] | None = None  # gather units that the user names, see `leaves.py`
    persistent_total: int | None = None  # most elements that stay whole so; None: no bound
    keep: tuple[str, ...] = ()  # names of modules that stay in fp32, see `kept.py`


@dataclass(frozen=True)
class Groups:
    """Communicators of the mechanism: see `Mesh`."""

    params: Communicator
    grads: Communicator
    replicas: Communicator
    control: Communicator
    experts: Groups | None = None  # of the parameters of experts that only some of the ranks hold

    @cached_property
    def holders(self) -> Holders:
        """Of the same parameters."""
        return Holders(self.params, self.replicas)

    @property
    def all(self) -> tuple[Communicator, ...]:
        mine = self.params, self.grads, self.replicas, self.control
        return mine if self.experts is None else (*mine, self.experts.params, self.experts.grads)

    def of(self, param: nn.Parameter) -> Groups:
        """Those among which this parameter is sharded and reduced."""
        return self.experts if self.experts is not None and expert_part(param) is not None else self

    @property
    def rank(self) -> int:
        return self.control.ranks[self.control.rank]

    @property
    def data_parallel_size(self) -> int:
        return self.grads.size * self.replicas.size


def check_free(module: nn.Module) -> None:
    """Refuses a model that another engine holds or that has no values yet."""
    for name, p in module.named_parameters():
        if slot_of(p) is not None and held_by(p) is None:
            raise ModelError(
                f"parameter '{name}' belongs to another engine already; call destroy() on that engine first, or build one "
                "engine for both uses"
            )
        if p.is_meta:
            raise ModelError(
                f"parameter '{name}' is on the meta device and has no values; give it some with "
                "zeroengine.zero.materialize(model, values) before zeroengine.initialize, or build the model inside zero.Init()"
            )


def check_same(module: nn.Module, groups: Groups) -> None:
    """Refuses a model that is not the same on all ranks. Collective."""
    named = [(common_name(n, p), p) for n, p in module.named_parameters()]
    lines = [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in named]
    if not are_alike(lines, groups.control, "model structure"):
        told = first_difference(lines, groups.control, "parameters of the model")
        raise DivergenceError(f"{told}; build the same model everywhere")


def cast_buffers(module: nn.Module, rule: ShardingRule) -> None:
    """Floating-point buffers follow the parameters' dtype, so that they do not promote activations."""
    dtype = rule.dtype
    if dtype is None:
        return
    inside = {m for outer in kept_modules(module, rule.keep).values() for m in outer.modules()}
    for child in module.modules():
        if child in inside:
            continue
        for name, buffer in child._buffers.items():
            # Frequencies of rotary embeddings lose positions in 16 bits; models that have them cast after use.
            kept = name.endswith("inv_freq") or name in getattr(child, "fp32_buffers", ())
            if buffer is not None and buffer.is_floating_point() and not kept:
                child._buffers[name] = buffer.to(dtype)


@dataclass(frozen=True)
class Laid:
    """Parameters that will lie in one bucket of `layout`; None for frozen ones that every rank holds whole, each in memory of its
    own. `source`: the type that they have, `dtype` the one that they get; `leaf`: their gather unit."""

    named: list[tuple[str, nn.Parameter]]
    layout: BucketLayout | None
    source: torch.dtype
    dtype: torch.dtype
    policy: Policy
    trainable: bool
    leaf: str | None
    group: Groups


def lay_out(module: nn.Module, rule: ShardingRule, groups: Groups) -> Iterator[Laid]:
    """Which parameters of `module` lie in which bucket, in order. Reads names, shapes and types only, and changes nothing."""
    for key, named in _classes(module, rule):
        source, dtype, trainable, persistent, leaf, _, _ = key
        group = groups.of(named[0][1])
        policy = policy_for(rule.stage, ranks=group.params.size, persistent=persistent)
        if not trainable and not policy.shard_params:
            yield Laid(named, None, source, dtype, policy, trainable, leaf, group)
            continue
        for members in cut_into_buckets([(n, p.numel()) for n, p in named], rule.bucket_size):
            chosen = [named[i] for i in members]
            layout = BucketLayout.build([(n, p.shape) for n, p in chosen], group.params.size)
            yield Laid(chosen, layout, source, dtype, policy, trainable, leaf, group)


@dataclass
class Built:
    """A model laid into buckets. `masters` has, for each trainable bucket whose values are not what is updated (16-bit ones;
    any on an accelerator whose update is the host's), the fp32 values of the range that this rank updates, where `placement`
    lets them live; `units` the sharded buckets of each gather unit."""

    buckets: list[Bucket]
    masters: dict[int, Tensor]
    placement: Placement
    units: dict[str, list[int]] = field(default_factory=dict)


def make_pools(groups: Groups) -> dict[str, BufferPool]:
    """Where buckets and gradients take buffers from, by the name of the communicator that reduces them."""
    return {g.grads.name: BufferPool(g.grads) for g in (groups, groups.experts) if g is not None}


def build_buckets(
    module: nn.Module,
    rule: ShardingRule,
    groups: Groups,
    pools: Mapping[str, BufferPool],
    placement: Placement,
    *,
    trains: bool,
) -> Built:
    """Lays the parameters of `module` into buckets and makes rank 0's values everybody's. Without `trains` there are no
    masters. Collective."""
    placement.open(groups.control, groups.params)
    buckets: list[Bucket] = []
    masters: dict[int, Tensor] = {}
    units: dict[str, list[int]] = {}
    for laid in lay_out(module, rule, groups):
        group, policy, dtype = laid.group, laid.policy, laid.dtype
        if laid.layout is None:
            for name, p in laid.named:
                claim([p])
                values = p.data.contiguous().view(-1)
                group.holders.broadcast(values, name)
                p.data = values.view(p.shape).to(dtype)
                note_frozen(p, name, group.holders)
            continue
        params, pool = [p for _, p in laid.named], pools[group.grads.name]
        claim(params)
        bucket = Bucket(len(buckets), laid.layout, params, dtype, policy, group.holders, pool, placement)
        flat = _flatten(bucket, laid.source, keep=not policy.shard_params and laid.source is dtype)
        group.holders.broadcast(flat, bucket.subject)
        if laid.trainable and trains:
            master = _master(bucket, flat)
            if master is not None:
                masters[bucket.index] = master
        bucket.adopt(flat)
        buckets.append(bucket)
        if laid.leaf is not None and policy.shard_params:
            units.setdefault(laid.leaf, []).append(bucket.index)
    for name, buffer in module.named_buffers():
        if buffer.numel():
            values = buffer.contiguous().view(-1)
            groups.holders.broadcast(values, name)
            buffer.copy_(values.view(buffer.shape))
    placement.agree(groups.control, "moving values out of memory")
    return Built(buckets, masters, placement, units)


def _master(bucket: Bucket, flat: Tensor) -> Tensor | None:
    """Master values from initial ones, None where the values themselves are what is updated."""
    placement, policy = bucket.placement, bucket.policy
    kept = flat[bucket.own] if policy.shard_state else flat
    placement.choose(bucket.index, kept.numel(), f"optimizer state of {bucket.subject}")
    values_there = policy.shard_params and placement.values_on_host
    wide = torch.promote_types(bucket.dtype, torch.float32)
    if bucket.dtype is wide and (values_there or not placement.on_host(bucket.index)):
        return None
    if values_there or placement.on_host(bucket.index):
        return on_host(kept.to(wide), placement.state_rule.pin)
    master = kept.to(wide, copy=True)
    home = placement.state(bucket.index)
    home.owns(lambda: [master])
    with placement.faults.kept(), at_hand(home, changed=True):
        pass  # out of memory, if it does not live there
    return master


_Key = tuple[torch.dtype, torch.dtype, bool, bool, str | None, str, bool]


def _classes(module: nn.Module, rule: ShardingRule) -> Iterable[tuple[_Key, list[tuple[str, nn.Parameter]]]]:
    """Parameters by what they must share to lie in one bucket, in order of registration."""
    found: dict[_Key, list[tuple[str, nn.Parameter]]] = {}
    leaf_of: dict[int, str] = {}
    if policy_for(rule.stage).shard_params:
        for leaf, members in find_leaves(module, rule.leaf_module).items():
            leaf_of.update((id(p), leaf) for m in members for p in m._parameters.values() if p is not None)
    whole = _persistent(module, rule)
    wide = {id(p) for outer in kept_modules(module, rule.keep).values() for p in outer.parameters()}
    for name, p in module.named_parameters():
        if not p.numel():
            continue
        dtype = rule.dtype if rule.dtype is not None and p.is_floating_point() and not is_packed(p) else p.dtype
        dtype = torch.promote_types(dtype, torch.float32) if id(p) in wide and p.is_floating_point() else dtype
        part = rule.part(name) if rule.part is not None else ""
        persistent = id(p) in whole
        within = None if persistent else leaf_of.get(id(p))
        key = (p.dtype, dtype, p.requires_grad, persistent, within, part, expert_part(p) is not None)
        found.setdefault(key, []).append((name, p))
    return found.items()


def _persistent(module: nn.Module, rule: ShardingRule) -> set[int]:
    """Parameters that stay whole: those below the threshold, the smallest first, as far as the bound on them all allows; and
    those of what peft runs on one rank alone when it saves, the encoders of prompts."""
    small = sorted((p for p in module.parameters() if p.numel() < rule.persistence_threshold), key=lambda p: p.numel())
    chosen, total = set(), 0
    for p in small:
        total += p.numel()
        if rule.persistent_total is not None and total > rule.persistent_total:
            break
        chosen.add(id(p))
    for adapted in module.modules():
        if hasattr(type(adapted), "get_prompt_embedding_to_save"):
            chosen.update(id(p) for p in getattr(adapted, "prompt_encoder", nn.Module()).parameters())
    return chosen


def _flatten(bucket: Bucket, source: torch.dtype, keep: bool) -> Tensor:
    """The bucket's values in one buffer; with `keep` in memory of the communicator, which may hold them for good."""
    like = torch.empty(0, dtype=source, device=bucket.device)
    flat = bucket.comm.empty(bucket.layout.padded, like) if keep else like.new_empty(bucket.layout.padded)
    flat[bucket.layout.numel :].zero_()
    for p, spec in zip(bucket.params, bucket.layout.specs, strict=True):
        flat[spec.offset : spec.end].view(spec.shape).copy_(p.data)
        # The old memory can go now: peak memory is the model and one bucket.
        p.data = flat[spec.offset : spec.end].view(spec.shape)
    return flat
