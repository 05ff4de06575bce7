"""Tensor and sequence parallelism of one model, put on before its parameters are laid into buckets."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroengine.comm.protocol import Communicator
from zeroengine.config import Config
from zeroengine.engine.mechanism import Mechanism
from zeroengine.errors import ConfigError, DivergenceError, ModelError
from zeroengine.logging import log_rank0
from zeroengine.mesh import Mesh
from zeroengine.moe.experts import Experts
from zeroengine.moe.hf import is_stacked_experts
from zeroengine.parallel.cut import CutSequences
from zeroengine.parallel.group import SequenceGroup, make_group
from zeroengine.parallel.hf import SharedSequences, built_with, is_transformers_model
from zeroengine.parallel.hf_attention import ulysses_degree
from zeroengine.parallel.loss import token_sum
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.parallel.tensor_plan import plan_for
from zeroengine.wording import listed
from zeroengine.zero.edits import digest
from zeroengine.zero.held import claim
from zeroengine.zero.layout import Piece
from zeroengine.zero.residency import slot_of
from zeroengine.zero.tensor import tensor_shard


def share_sequences(
    model: nn.Module, settings: Config, mesh: Mesh, layers: TensorParallel | None = None, trains: bool = True
) -> SharedSequences | None:
    """Makes the `cp` ranks of `mesh` share the sequences of `model`; None where cp is 1. Collective.

    Raises `ModelError` for a model whose attention cannot be exchanged.
    """
    name = attention_name(model, settings, mesh)
    if name is None:
        return None
    if not is_transformers_model(model):
        raise ModelError(
            f"mesh.cp is {mesh.degrees.cp}: {type(model).__name__} is no transformers model, whose attention could run over "
            "a shared sequence; set mesh.cp to 1, or use zeroengine.sequence (DistributedAttention, ring_attention) in the model"
        )
    group = sequence_group(name, model, settings, mesh, trains)
    total = layers.loss.total if layers is not None and layers.loss is not None else token_sum
    section = settings.sequence_parallel
    kind = CutSequences if section.batches == "cut" else SharedSequences
    factor = reduction_factor(settings, mesh)
    return kind(model, group, name, mesh.same_sample, mesh.control, factor, total, alone_in_eval=section.disable_in_eval)


def attention_name(model: nn.Module, settings: Config, mesh: Mesh) -> str | None:
    """Under which name attention runs over the ranks of `cp`; None where each has its own sequences."""
    section = settings.sequence_parallel
    built = built_with(model)
    if mesh.degrees.cp == 1 and built is None:
        return None
    name = f"zero_{section.attention}" if section.attention is not None else built or "zero_ulysses"
    if built is not None and name != built:
        raise ConfigError(f'sequence_parallel.attention is "{section.attention}", but the model was built with "{built}"; keep one')
    return name


def sequence_group(name: str, model: nn.Module, settings: Config, mesh: Mesh, trains: bool) -> SequenceGroup:
    """The ranks that share sequences by the attention of that name. Collective over them."""
    section = settings.sequence_parallel
    heads = ulysses_degree(name, mesh.degrees.cp, section.ulysses)
    if trains:
        _check_dropout(model, mesh.degrees.cp // heads)
    zigzag = section.layout == "zigzag" and section.batches == "whole"
    return make_group(mesh.fabric, mesh.ranks_along("cp"), heads, zigzag)


def reduction_factor(settings: Config, mesh: Mesh) -> float:
    """What the reduction of gradients divides a sum over the tokens of all ranks by."""
    return float(mesh.data_parallel_size if settings.gradient_reduction == "mean" else mesh.sample_groups)


def _check_dropout(model: nn.Module, ring: int) -> None:
    """No rank of a ring sees a whole row of attention probabilities."""
    config = getattr(model, "config", None)
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        rate = getattr(config, name, None)
        if rate and ring > 1:
            raise ConfigError(
                f"{name} of {type(model).__name__}'s config is {rate}: attention dropout does not work in a ring (of {ring} ranks "
                'here); set it to 0, or use Ulysses alone (sequence_parallel.attention "ulysses")'
            )


def share_layers(model: nn.Module, settings: Config, mesh: Mesh) -> TensorParallel | None:
    """Splits the layers of `model` over the `tp` ranks of `mesh`, by a plan that is printed; None where tp is 1. Collective.

    Raises `ModelError` or `ConfigError` for a model that cannot be split that way, before anything is changed.
    """
    if mesh.degrees.tp == 1:
        return None
    splits = settings.tensor_parallel.sequence_parallel
    plan = plan_for(model).without(whole_experts(model, settings))
    log_rank0(plan.show())
    claim(list(model.parameters()))  # parameters of zero.Init are whole on every rank until they are cut
    return TensorParallel(model, plan, mesh.tensor, mesh.fabric.device, splits, settings.tensor_parallel.loss_parallel)


def whole_experts(model: nn.Module, settings: Config) -> list[str]:
    """Experts that the ranks of a tensor group do not cut, by name: all, where each rank of the group has other tokens."""
    if not settings.tensor_parallel.sequence_parallel:
        return []
    return [n for n, m in model.named_modules() if is_stacked_experts(m) or isinstance(m, Experts)]


def check_plain(model: nn.Module) -> None:
    """Refuses parameters that another library has distributed."""
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise ModelError(
                f"parameter '{name}' is a DTensor (placements {p.placements}): it was distributed before zeroengine.initialize; "
                "give the model as one process has it, and set `mesh.tp` in the config"
            )


def place_parts(pieces: dict[str, list[Piece]], model: nn.Module) -> dict[str, list[Piece]]:
    """Tells the pieces of tensor-parallel parameters, and of what an optimizer keeps for them, where in the whole they lie: that
    is what a checkpoint saves and loads, at any degree. Returns `pieces`."""
    parts = {name: (p.shape, shard) for name, p in model.named_parameters() if (shard := tensor_shard(p)) is not None}
    for piece in (piece for each in pieces.values() for piece in each) if parts else ():
        shape, shard = parts.get(piece.name, (None, None))
        if piece.shape == shape:  # else a step count, the same for all parts
            piece.part = shard
    return pieces


def check_replicas(model: nn.Module, mechanism: Mechanism, tensor: Communicator) -> None:
    """Raises `DivergenceError` on every rank, with the names, if parameters that the ranks of `tensor` (control) all hold whole
    differ between them. Collective."""
    found: dict[str, int] = {}
    with mechanism.exposed(write=False):
        for bucket in mechanism.buckets:
            for s in bucket.layout.segments(bucket.own.start, bucket.own.stop):
                if tensor_shard(bucket.params[s.index]) is None:
                    found[bucket.layout.specs[s.index].name] = digest(bucket.shard[s.at : s.at + s.end - s.start])
    for name, p in model.named_parameters():
        if slot_of(p) is None and tensor_shard(p) is None and p.numel():
            found[name] = digest(p.detach().reshape(-1))
    if not found:
        return
    table = tensor.exchange(torch.tensor(list(found.values()), dtype=torch.int64), "whole parameters of shared layers")
    odd = [name for name, column in zip(found, table.unbind(1), strict=True) if not bool((column == column[0]).all())]
    if odd:
        raise DivergenceError(
            f"rank {tensor.ranks[tensor.rank]}: ranks {list(tensor.ranks)} share layers and hold these parameters whole, but not with "
            f"the same values: {listed(odd)}; make edits on all of them, and see that forward depends on nothing else than the batch"
        )
