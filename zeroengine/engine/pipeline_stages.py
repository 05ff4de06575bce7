"""Sharding of the stages that a rank holds: buckets that never cross stages, one order of reductions for each stage, tied
weights, and what all stages decide together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from zeroengine.comm.protocol import Communicator
from zeroengine.comm.together import exchange_values, together
from zeroengine.config import Config
from zeroengine.engine.mechanism import Mechanism, build_gradients, build_sharder, keep_formats, placement_for, prepare, sharding_rule
from zeroengine.errors import ModelError
from zeroengine.mesh import Mesh
from zeroengine.optim.clip import first_bad, first_told, root
from zeroengine.optim.layers import layer_squares, over_layers
from zeroengine.pipeline.layers import Tie
from zeroengine.pipeline.module import PipelineModule
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.build import Groups, build_buckets, check_same, make_pools
from zeroengine.zero.gradients import BucketGradients
from zeroengine.zero.reducer import Reducer


@dataclass(frozen=True)
class StageComms:
    """Communicators along the pipeline. `stream`, `extra`: messages (see `Wire`); `labels`, `labels_extra`: from the rank of
    the first stage to that of the last; `control`: small CPU tensors. Each joins the ranks with the same data."""

    stream: Communicator
    extra: Communicator
    labels: Communicator
    labels_extra: Communicator
    control: Communicator

    @staticmethod
    def of(mesh: Mesh) -> StageComms:
        """Collective."""
        ranks = mesh.ranks_along("pp")
        make = mesh.fabric.communicator
        return StageComms(
            make("pipeline", ranks), make("pipeline layouts", ranks), make("labels", ranks), make("labels layouts", ranks),
            make("pipeline control", ranks, control=True),
        )  # fmt: skip


class _Facts(NamedTuple):
    """What stages must agree on in a tied weight."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}, requires_grad {self.requires_grad}"


class Ties:
    """Weights shared by stages on several ranks. They move point to point over the pipeline's own stream: the owner adds up
    in the order of stages and sends the sum, so every stage has the same bits."""

    def __init__(self, module: PipelineModule, comms: StageComms, device: torch.device) -> None:
        self._comms = comms
        self._device = device
        self.all = module.ties
        self.mine: list[tuple[Tie, list[int]]] = []  # with the pipeline ranks that share it, the owner's first
        self.not_owned: frozenset[str] = frozenset()
        for tie in module.ties:
            ranks = module.ranks_of(tie)
            if comms.stream.rank in ranks and len(ranks) > 1:
                self.mine.append((tie, ranks))
                if ranks[0] != comms.stream.rank:
                    self.not_owned |= frozenset(tie.names)

    def equalize(self, module: PipelineModule) -> None:
        """Makes the owner's initial values everybody's. Collective over the pipeline where there are ties; raises `ModelError` on all
        its ranks where stages have unlike weights under one key."""
        by_name = dict(module.named_parameters())
        self._check_alike(by_name)
        for tie, ranks in self.mine:
            for name in tie.names:
                p = by_name[name]
                values = p.data.to(self._device).contiguous().view(-1)
                self._from_owner(values, ranks, name)
                p.data = values.view(p.shape)

    def _check_alike(self, by_name: Mapping[str, torch.nn.Parameter]) -> None:
        tied = [n for tie in self.all for n in tie.names]
        if not tied:
            return
        mine = {n: _Facts(tuple(p.shape), str(p.dtype), p.requires_grad) for n in tied if (p := by_name.get(n)) is not None}
        told = exchange_values(self._comms.control, "shapes of tied weights", mine)
        for name in tied:
            found = {rank: facts[name] for rank, facts in enumerate(told) if name in facts}
            if len(set(found.values())) > 1:
                listed = "; ".join(f"pipeline rank {rank}: {facts}" for rank, facts in found.items())
                raise ModelError(f"the tied weight '{name}' must be alike on all stages that have it ({listed})")

    def sum(self, tie: Tie, ranks: list[int], values: torch.Tensor, subject: str) -> None:
        """values = sum over the ranks of the tie. 1-D."""
        stream = self._comms.stream
        if stream.rank == ranks[0]:
            theirs = torch.empty_like(values)
            for peer in ranks[1:]:
                stream.recv(theirs, peer, f"tied {subject}").wait()
                values.add_(theirs)
        else:
            stream.send(values, ranks[0], f"tied {subject}").wait()
        self._from_owner(values, ranks, subject)

    def used(self, names: set[str]) -> set[str]:
        """Of all tied names those that some stage used. Collective over the pipeline where there are ties."""
        tied = [n for tie in self.all for n in tie.names]
        if not tied:
            return set()
        flags = torch.tensor([n in names for n in tied]).to(torch.int64)
        anywhere = self._comms.control.exchange(flags, "use of tied weights").amax(0).tolist()
        return {n for n, flag in zip(tied, anywhere, strict=True) if flag}

    def _from_owner(self, values: torch.Tensor, ranks: list[int], subject: str) -> None:
        stream = self._comms.stream
        if stream.rank == ranks[0]:
            for work in [stream.send(values, peer, f"sum of {subject}") for peer in ranks[1:]]:
                work.wait()
        else:
            stream.recv(values, ranks[0], f"sum of {subject}").wait()


class TiedReducer(Reducer):
    """Reduces a tied weight at the end of the step only: several stages add to it, at their own times."""

    single = False  # a step has one micro-batch

    def _may_launch(self, g: BucketGradients) -> bool:
        return self.synchronize

    def _is_last(self) -> bool:
        return self.single


class StageReducers:
    """The `Reductions` of a rank's stages and ties as one. `parts`: by the name of the part, in the order of registration. Each stage
    ends its own micro-batches and says itself when it may launch."""

    def __init__(self, parts: dict[str, Reducer], ties: Ties, control: Communicator) -> None:
        self.parts = parts
        self.gradients = [g for r in parts.values() for g in r.gradients]
        self.synchronize = True
        self.guided = self.plain = False
        self._ties = ties
        self._control = control
        self._scale = 1.0  # as each part's own
        self._begun = False

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value
        for reducer in self.parts.values():
            reducer.scale = value

    @property
    def unfinished(self) -> bool:
        return any(r.unfinished for r in self.parts.values())

    def before_gradients(self, part: str, last: bool) -> None:
        if not self._begun:  # the first micro-batch of the step
            self._begun = True
            for reducer in self.parts.values():
                if isinstance(reducer, TiedReducer):
                    reducer.single = last
        if part in self.parts:
            self.parts[part].synchronize = last

    def after_gradients(self, part: str) -> None:
        """A micro-batch's weight gradients of one stage are there. The last one is ended by `finish`."""
        reducer = self.parts.get(part)
        if reducer is not None:
            reducer.mark_backward()
            if not reducer.synchronize:
                reducer.next_micro_batch()

    def mark_backward(self) -> None:
        return

    def next_micro_batch(self) -> None:
        return

    def finish(self, marks: Sequence[int] = ()) -> tuple[frozenset[str], list[int]]:
        used: set[str] = set()
        for reducer in self.parts.values():
            if isinstance(reducer, TiedReducer):
                reducer.mark_backward()
            used |= reducer.finish()[0]
            reducer.synchronize = False
        for tie, ranks in self._ties.mine:
            for g in self.parts[f"tied.{tie.key}"].gradients if f"tied.{tie.key}" in self.parts else []:
                self._ties.sum(tie, ranks, g.updated.view(-1), g.bucket.subject)
        agreed = torch.tensor(list(marks), dtype=torch.int32)
        self._control.all_reduce(agreed, "marks of the step", op="max").wait()
        return frozenset(used | self._ties.used(used)), agreed.tolist()

    def count_as_used(self, bucket: Bucket, index: int) -> None:
        for reducer in self.parts.values():
            if any(g.bucket is bucket for g in reducer.gradients):
                reducer.count_as_used(bucket, index)

    def forget(self) -> None:
        for reducer in self.parts.values():
            reducer.forget()

    def clear(self) -> None:
        self._begun = False
        for reducer in self.parts.values():
            reducer.clear()

    def remove(self) -> None:
        for reducer in self.parts.values():
            reducer.remove()


def build_stages(module: PipelineModule, config: Config, groups: Groups, ties: Ties, everyone: Communicator, trains: bool) -> Mechanism:
    """Shards the stages of this rank. Raises the same error on all ranks for a model that is unlike or cannot be trained. Collective over
    `everyone`."""
    pools = make_pools(groups)
    base = sharding_rule(config)
    rule = replace(base, part=module.part_of)

    def prepared() -> None:
        check_same(module, groups)
        prepare(module, rule)

    together(everyone, "preparing the stages", prepared)
    placement = placement_for(config, module, groups.rank, trains=trains, everyone=everyone)
    built = build_buckets(module, rule, groups, pools, placement, trains=trains)
    sharder = build_sharder(module, built, config)
    by_part: dict[str, list[BucketGradients]] = {}
    for made in build_gradients(built.buckets if trains else [], config, groups, pools):
        by_part.setdefault(module.part_of(made.bucket.layout.specs[0].name), []).append(made)
    parts: dict[str, Reducer] = {}
    for name in sorted(by_part):
        cls = TiedReducer if name.startswith("tied.") else Reducer
        parts[name] = cls(by_part[name], groups.control)
        parts[name].synchronize = False
    reducers = StageReducers(parts, ties, groups.control)
    held, kept = tuple(pools.values()), keep_formats(module, rule)
    return Mechanism(built.buckets, sharder, reducers, held, reducers.gradients, groups, built.masters, placement, handles=kept)


class AcrossStages:
    """The `NormRule` over all stages. `tensor`: control over the ranks that share each layer."""

    def __init__(self, ties: Ties, groups: Groups, control: Communicator, tensor: Communicator | None = None) -> None:
        self._not_mine = ties.not_owned
        self._groups = groups
        self._control, self._tensor = control, tensor

    def norm(self, gradients: list[BucketGradients]) -> float:
        """2-norm before clipping; a tied weight counts once, and so does what every rank of a tensor group holds. Collective."""
        counted = [g for g in gradients if not self._not_mine.intersection(s.name for s in g.bucket.layout.specs)]
        mine = layer_squares(counted, self._groups.control, self._groups.params.ranks)
        sums = self._control.exchange(mine, "squares of the stages").sum(0)
        if self._tensor is not None:
            sums = over_layers(sums, self._tensor)
        return root(float(sums.sum()))

    def blame(self, gradients: list[BucketGradients]) -> str | None:
        """Names the parameter, of any stage. Collective."""
        found = first_told(self._control, first_bad(gradients, self._groups.control))
        return found if self._tensor is None else first_told(self._tensor, found)


def check_places(module: PipelineModule, mesh: Mesh) -> None:
    """Refuses a module that was cut for another mesh than this."""
    if mesh.degrees.pp != module.num_stages or mesh.coordinate("pp") != module.stage_rank:
        raise ModelError(
            f"rank {mesh.rank}: the PipelineModule was cut into {module.num_stages} stages and is number {module.stage_rank}, "
            f"but the mesh has pp {mesh.degrees.pp} and this rank is number {mesh.coordinate('pp')}; build it with "
            "num_stages of the mesh"
        )
