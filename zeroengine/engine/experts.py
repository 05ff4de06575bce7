"""Experts of one model spread over ranks, before its parameters are laid into buckets."""

from __future__ import annotations

import os

import torch
from torch import nn

from zeroengine.comm.local import LocalCommunicator
from zeroengine.config import Config
from zeroengine.engine.parallel import reduction_factor
from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import log_rank0
from zeroengine.mesh import DATA_DIMS, Mesh
from zeroengine.moe.experts import Experts, StackedExperts, check_degree
from zeroengine.moe.group import Batch, ExpertGroup, make_hops
from zeroengine.moe.hf import GlobalRouterLoss, convert, is_stacked_experts, revert
from zeroengine.moe.layer import SparseExperts, SparseLayer, sparse_layers
from zeroengine.moe.statistics import LayerStatistics, Statistics
from zeroengine.parallel.hf import SharedSequences
from zeroengine.parallel.stages import StageSequences
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.zero.build import Groups, check_same
from zeroengine.zero.experts import mark_stack
from zeroengine.zero.held import claim

Sequences = SharedSequences | StageSequences


class ExpertParallel:
    """The layers with experts of one model, spread over the ranks of `group`. `remove` makes the model what it was."""

    def __init__(self, model: nn.Module, groups: Groups, group: ExpertGroup, bias_speed: float, splits: bool = False) -> None:
        """`splits`: the ranks of a tensor group split sequences between the layers. Collective."""
        self.group = group
        self._model, self._batch, self._bias_speed = model, group.batch.ranks, bias_speed
        # on a split sequence too: blocks then hand their shared experts the tokens of sequences as such
        self._converted = convert(model) if group.size > 1 or bias_speed or splits else {}
        self.layers: dict[str, SparseLayer] = {**sparse_layers(model), **self._converted}
        try:
            for name, layer in self.layers.items():
                check_degree(layer.held.num_experts, group.size, name)
        except ConfigError:
            revert(model, self._converted)
            raise
        own = {n: getattr(layer.router, "rule", None) for n, layer in self.layers.items() if isinstance(layer, SparseExperts)}
        limited = [n for n, rule in own.items() if rule is not None and rule.capacity is not None]
        if limited and not group.batch.ordered:
            revert(model, self._converted)
            key, remedy = ("tensor_parallel.sequence_parallel", "set it to false") if splits else ("mesh.cp", "set it to 1")
            raise ConfigError(
                f"{key}: '{limited[0]}' drops tokens by their places in the batch, and each rank has other places of every sequence; "
                f"{remedy}, or drop_tokens to False"
            )
        applies = GlobalRouterLoss.applies(model) and group.batch.ranks.size > 1
        self.router_loss = GlobalRouterLoss(model, group.batch) if applies else None
        if group.size > 1:
            equalize([layer.held for layer in self.layers.values()], groups)
        for name, layer in self.layers.items():
            layer.spread(group, name)
        self._mark_stacks(True)

    def remove(self) -> None:
        """Gives every layer all of its experts, and the model its own modules. Collective. After the buckets are gone."""
        self._mark_stacks(False)
        for layer in self.layers.values():
            layer.gather()
        revert(self._model, self._converted)
        if self.router_loss is not None:
            self.router_loss.remove()

    def _mark_stacks(self, stacked: bool) -> None:
        """Lets an optimizer tell experts in one tensor apart."""
        for module in self._model.modules():
            if isinstance(module, StackedExperts) or is_stacked_experts(module):
                for p in module.parameters(recurse=False):
                    mark_stack(p, stacked)

    def after_step(self) -> None:
        """Moves the biases of routers that balance by them. Collective."""
        moved = [layer for layer in self.layers.values() if layer.balances(self._bias_speed)]
        if moved:
            loads = torch.cat([layer.statistics.load for layer in moved])
            table = self._batch.exchange(loads, "load of the experts").sum(0)
            for layer, load in zip(moved, table.split([layer.statistics.num_experts for layer in moved]), strict=True):
                layer.balance(load, self._bias_speed)

    def forget(self) -> None:
        """Begins to count for another step."""
        for layer in self.layers.values():
            layer.statistics.clear()

    def statistics(self) -> dict[str, LayerStatistics]:
        """By layer, since the last step began. Collective."""
        found = {}
        for name, layer in self.layers.items():
            mine = layer.statistics
            row = torch.cat([mine.row(), torch.tensor([float(mine.computed)], dtype=torch.float64)])
            table = self._batch.exchange(row, f"statistics of {name}")
            found[name] = Statistics.over(table[:, :-1], table[:, -1])
        return found


def equalize(experts: list[Experts], groups: Groups) -> None:
    """Makes rank 0's values of all experts everybody's, before each rank keeps its part of them. Collective."""
    for module in experts:
        for name, p in module.named_parameters():
            claim([p])
            values = p.data.contiguous().view(-1)
            groups.holders.broadcast(values, name)
            p.data = values.view(p.shape)


def token_batch(settings: Config, mesh: Mesh, layers: TensorParallel | None, sequences: Sequences | None) -> Batch:
    """Which ranks hold tokens of their own, and which of their rows are tokens. Collective."""
    if layers is not None and layers.region.splits:
        ranks = mesh.fabric.communicator("tokens", mesh.ranks_along(*DATA_DIMS, "tp"), control=True)
        region = layers.region

        def valid(mask: torch.Tensor | None) -> torch.Tensor | None:
            return region.valid(mask if sequences is None else sequences.link.valid(mask))

        averaged = mesh.control.size if sequences is None else reduction_factor(settings, mesh)
        return Batch(ranks, averaged, valid, ordered=False)
    if sequences is not None:
        return Batch(mesh.control, reduction_factor(settings, mesh), sequences.link.valid, ordered=False)
    return Batch.over(mesh.control)


def expert_group(settings: Config, mesh: Mesh, batch: Batch) -> ExpertGroup:
    """The streams between the ranks that share experts. Collective."""
    ranks, section = mesh.experts, settings.moe
    if ranks is None:
        rank = mesh.rank
        return ExpertGroup(LocalCommunicator("experts", rank), LocalCommunicator("experts control", rank), batch)
    hops = None
    if section.two_hop:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        hops = make_hops(mesh.fabric, ranks.tokens.ranks, section.ranks_per_node or max(1, min(local // mesh.degrees.tp, ranks.size)))
    return ExpertGroup(ranks.tokens, ranks.control, batch, hops, section.dispatch_dtype, section.copies, section.copies_above)


def spread_experts(
    model: nn.Module, settings: Config, mesh: Mesh, groups: Groups, stage: bool = False, layers: TensorParallel | None = None,
    sequences: Sequences | None = None,
) -> ExpertParallel | None:  # fmt: skip
    """Spreads the experts of `model` over the `ep` ranks of `mesh`, and lets its routers see the global batch; None where it
    has none. Collective. Raises `ModelError` for a model without experts where ranks should share them (a `stage` of a pipeline
    may have none), and `ConfigError` where they cannot. `layers`, `sequences`: of
    the model, that ranks share."""
    shared = mesh.experts is not None
    if not sparse_layers(model) and not any(is_stacked_experts(m) for m in model.modules()):
        if shared and not stage:
            raise ModelError(
                f"mesh.ep is over 1, but {type(model).__name__} has no layers with experts that ranks can share "
                "(zeroengine.moe.MoE, or a mixture of experts of transformers); set mesh.ep to 1"
            )
        return None
    if shared:
        check_same(model, groups)
    group = expert_group(settings, mesh, token_batch(settings, mesh, layers, sequences))
    made = ExpertParallel(model, groups, group, settings.moe.bias_speed, layers is not None and layers.region.splits)
    if isinstance(sequences, SharedSequences):
        sequences.router_loss = made.router_loss is not None
    if made.layers:
        total = ", ".join(sorted({str(layer.held.num_experts) for layer in made.layers.values()}))
        log_rank0(f"mixture of experts: {len(made.layers)} layers of {total} experts, shared by {made.group.size} ranks")
    return made


def groups_of(mesh: Mesh) -> Groups:
    """The communicators of the mechanism on `mesh`."""
    experts = None
    if mesh.experts is not None:
        e = mesh.experts
        experts = Groups(e.params, e.grads, mesh.replicate_grads, mesh.control)
    return Groups(mesh.shard_params, mesh.shard_grads, mesh.replicate_grads, mesh.control, experts)
