"""Tensor and sequence parallelism of one model, put on before its parameters are laid into buckets."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from zeroengine.config import Config
from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import log_rank0
from zeroengine.mesh import Mesh
from zeroengine.parallel.group import make_group
from zeroengine.parallel.hf import SharedSequences, built_with, is_transformers_model
from zeroengine.parallel.hf_attention import register, ulysses_degree
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.parallel.tensor_plan import plan_for
from zeroengine.zero.held import claim
from zeroengine.zero.layout import Piece
from zeroengine.zero.tensor import tensor_shard


def share_sequences(model: nn.Module, settings: Config, mesh: Mesh) -> SharedSequences | None:
    """Makes the `cp` ranks of `mesh` share the sequences of `model`; None where cp is 1. Collective.

    Raises `ModelError` for a model whose attention cannot be exchanged.
    """
    cp, section = mesh.degrees.cp, settings.sequence_parallel
    built = built_with(model)
    if cp == 1 and built is None:
        return None
    if not is_transformers_model(model):
        raise ModelError(
            f"mesh.cp is {cp}: {type(model).__name__} is no transformers model, whose attention could run over "
            "a shared sequence; set mesh.cp to 1, or use zeroengine.sequence (DistributedAttention, ring_attention) in the model"
        )
    register()
    name = f"zero_{section.attention}" if section.attention != "auto" else built or "zero_ulysses"
    if built is not None and name != built:
        raise ConfigError(
            f'sequence_parallel.attention is "{section.attention}", but the model was built with "{built}"; keep one'
        )
    group = make_group(
        mesh.fabric, mesh.ranks_along("cp"), ulysses_degree(name, cp, section.ulysses), section.layout == "zigzag"
    )
    factor = mesh.data_parallel_size if settings.gradient_reduction == "mean" else mesh.sample_groups
    return SharedSequences(model, group, name, mesh.same_sample, mesh.control, float(factor))


def share_layers(model: nn.Module, settings: Config, mesh: Mesh) -> TensorParallel | None:
    """Splits the layers of `model` over the `tp` ranks of `mesh`, by a plan that is printed; None where tp is 1. Collective.

    Raises `ModelError` or `ConfigError` for a model that cannot be split that way, before anything is changed.
    """
    if mesh.degrees.tp == 1:
        return None
    splits = settings.tensor_parallel.sequence_parallel
    if splits and mesh.degrees.cp > 1:
        raise ConfigError("tensor_parallel.sequence_parallel with mesh.cp > 1: sequences are split already; set it to false")
    plan = plan_for(model)
    log_rank0(plan.show())
    claim(list(model.parameters()))  # parameters of zero.Init are whole on every rank until they are cut
    return TensorParallel(model, plan, mesh.tensor, mesh.fabric.device, splits)


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
