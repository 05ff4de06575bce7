"""Tensor and sequence parallelism of one model, put on before its parameters are laid into buckets."""

from __future__ import annotations

from torch import nn

from zeroengine.config import Config
from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import log_rank0
from zeroengine.mesh import Mesh
from zeroengine.parallel.group import make_group
from zeroengine.parallel.hf import SharedSequences, built_with, is_transformers_model
from zeroengine.parallel.hf_attention import register, ulysses_degree
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.parallel.tensor_plan import plan_for


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
    return TensorParallel(model, plan, mesh.tensor, mesh.fabric.device, splits)
