"""Memory and traffic that follow from a layout: the same arithmetic for a built engine and for a plan of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zeroengine.config.zero import ZeroSection
from zeroengine.offload.buffers import padded, rounded
from zeroengine.zero.gradients import GradientRule
from zeroengine.zero.layout import BucketLayout
from zeroengine.zero.policy import Policy, policy_for
from zeroengine.zero.reducer import IN_FLIGHT
from zeroengine.zero.window import GatherWindow


@dataclass(frozen=True)
class BucketFacts:
    """One bucket on one rank. `rank`: its index in the shard group; `rule`: how gradients are combined, None where there are
    none; `accumulation`: micro-batches of a step; `kind`: name of the communicator that gathers it; `apart`: its update is made on the
    host, away from its values."""

    layout: BucketLayout
    dtype: torch.dtype
    policy: Policy
    rank: int
    replicas: int
    rule: GradientRule | None
    accumulation: int
    kind: str = "params"
    values_in_memory: bool = True
    state_in_memory: bool = True
    apart: bool = False
    values_on_host: bool = False  # of an accelerator
    state_on_host: bool = False

    @property
    def ranks(self) -> int:
        return self.layout.shards

    @property
    def values(self) -> int:
        """Bytes of the values at rest."""
        return self.dtype.itemsize * (self.layout.shard_numel if self.policy.shard_params else self.layout.padded)

    @property
    def sliced_gradients(self) -> bool:
        """A rank has its slice of the gradients only, once they are reduced."""
        return self.policy.slices_gradients(self.ranks, last=self.accumulation == 1)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients when a step's backward is over."""
        if self.rule is None:
            return 0
        return self.rule.accumulate.itemsize * (self.layout.shard_numel if self.sliced_gradients else self.layout.padded)

    def state(self, moments: int) -> tuple[int, list[int]]:
        """Bytes of the master, and of the optimizer's tensors for each part of a parameter."""
        lo, hi = self.layout.slice_of(self.rank) if self.policy.shard_state else (0, self.layout.padded)
        wide = torch.promote_types(self.dtype, torch.float32).itemsize
        master = wide * (hi - lo) if self.dtype.itemsize < wide or self.apart else 0
        return master, [wide * (s.end - s.start) for s in self.layout.segments(lo, hi)] * moments


def at_rest(facts: Sequence[BucketFacts], moments: int, loose: int, value_buffers: int = 0, state_buffers: int = 0) -> dict[str, int]:
    """Bytes by kind when a step's gradients are reduced. `moments`: tensors of a parameter's size that the optimizer keeps;
    `loose`: bytes of parameters in no bucket; `value_buffers`, `state_buffers`: host buffers for what lives on a disk."""
    parameters, disk, gradients, optimizer = loose, 0, 0, 0
    values, state = [], []  # bytes of the records on disk
    for bucket in facts:
        if bucket.values_in_memory:
            parameters += bucket.values
        else:
            disk += bucket.values
            values.append(rounded(bucket.values))
        if bucket.rule is None:
            continue
        gradients += bucket.gradients
        master, parts = bucket.state(moments)
        if bucket.state_in_memory:
            optimizer += master + sum(parts)
        else:
            disk += master + sum(parts)
            state.append(rounded(master) + rounded(sum(padded(n) for n in parts)))
    staging = sum(min(buffers, len(r)) * max(r, default=0) for buffers, r in ((value_buffers, values), (state_buffers, state)))
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "disk": disk, "staging": staging}


def of_step(facts: Sequence[BucketFacts]) -> dict[str, int]:
    """Bytes of parameters and gradients that a rank sends in a step, by "communicator.operation". A micro-batch gathers sharded
    values once in forward and once in backward. Rajbhandari et al. (2020), section 7."""
    sent: dict[str, int] = {}

    def count(name: str, elements: int, itemsize: int, ranks: int, times: int = 1) -> None:
        sent[name] = sent.get(name, 0) + times * (elements * itemsize * (ranks - 1) // ranks)

    for b in facts:
        grads = b.kind.replace("params", "grads")
        if b.policy.shard_params:
            count(f"{b.kind}.all_gather", b.layout.padded, b.dtype.itemsize, b.ranks, 2 * b.accumulation)
        if b.rule is None:
            continue
        sums = b.rule.accumulate.itemsize
        rounds = b.accumulation if b.policy.shard_grads else 1
        count(f"{grads}.reduce_scatter", b.layout.padded, b.rule.wire.itemsize, b.ranks, rounds)
        on_each = -(-b.layout.shard_numel // b.replicas) * b.replicas  # padded to equal parts
        count("replicas.all_reduce", on_each, sums, b.replicas, 2 * rounds)
        if not b.policy.shard_state:
            count(f"{grads}.all_gather", b.layout.padded, sums, b.ranks)  # the reduced gradients' other slices
        elif not b.policy.shard_params:
            count(f"{b.kind}.all_gather", b.layout.padded, b.dtype.itemsize, b.ranks)  # the updated values
    return {name: size for name, size in sent.items() if size}


def gathered_peak(facts: Sequence[BucketFacts], zero: ZeroSection) -> int:
    """Most bytes of gathered values: the engine's own window over the buckets in order, there and back."""
    sharded = [b for b in facts if b.policy.shard_params]
    if not sharded:
        return 0
    sizes = [b.layout.padded for b in sharded]
    window = GatherWindow(sizes, zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance, zero.stage3_max_live_parameters)
    gathered: set[int] = set()
    most = 0
    for turn in range(2):  # the second pass knows the order
        for phase, order in (("train", range(len(sizes))), ("backward", reversed(range(len(sizes))))):
            window.restart(phase)
            for index in order:
                keep, fetch = window.visit(phase, index, gathered.__contains__)
                gathered = (gathered & keep) | {index, *fetch}
                if turn:
                    most = max(most, sum(sharded[i].layout.padded * sharded[i].dtype.itemsize for i in gathered))
            gathered = set()
    return most


def travelling(facts: Sequence[BucketFacts]) -> int:
    """Whole gradients of buckets that are being added up and reduced at one time, where they are not kept whole anyway."""
    sizes = sorted((b.layout.padded * b.rule.accumulate.itemsize for b in facts if b.rule and b.sliced_gradients), reverse=True)
    return sum(sizes[: IN_FLIGHT + 2])  # those in flight, the one that was launched, the one that is filled


def at_stage(
    facts: Sequence[BucketFacts], stage: int, moments: int, loose: int, zero: ZeroSection, value_buffers: int = 0, state_buffers: int = 0
) -> dict[str, int]:
    """`at_rest` of the same buckets at another `stage`; `working`: gathered values and gradients on their way, at their most."""
    moved = [replace(b, policy=policy_for(stage, ranks=b.ranks)) for b in facts]
    rest = at_rest(moved, moments, loose, value_buffers, state_buffers)
    return {**rest, "working": gathered_peak(moved, zero) + travelling(moved)}
