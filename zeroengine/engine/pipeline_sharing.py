"""Tensor and sequence parallelism of the stages of a pipeline, and what the stages decide together about both."""

from __future__ import annotations

from zeroengine.comm.protocol import Communicator
from zeroengine.comm.together import exchange_values, together
from zeroengine.config import Config
from zeroengine.engine.parallel import attention_name, sequence_group, whole_experts
from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import log_rank0
from zeroengine.mesh import Mesh
from zeroengine.parallel.stages import StageAttention, StageSequences
from zeroengine.parallel.tensor import TensorParallel
from zeroengine.parallel.tensor_plan import Plan, plan_for
from zeroengine.pipeline.causal_lm import PipelinedCausalLM
from zeroengine.pipeline.module import PipelineModule
from zeroengine.zero.held import claim


def share_stage_layers(module: PipelineModule, settings: Config, mesh: Mesh, everyone: Communicator) -> TensorParallel | None:
    """Splits the layers of this rank's stages over the `tp` ranks of `mesh` by one plan for all stages, which is printed; None
    where tp is 1. Raises the same error on all ranks for a model that cannot be split. Collective over `everyone` (control)."""
    if mesh.degrees.tp == 1:
        return None
    section = settings.tensor_parallel
    plan = _common_plan(module, settings, everyone)
    log_rank0(plan.show())

    def split() -> TensorParallel:
        claim(list(module.parameters()))
        segments = module.segments(plan.styles) if section.sequence_parallel else None
        ties = {name: uses for tie in module.ties for name, uses in zip(tie.names, tie.uses, strict=True)}
        _check_ties(ties, plan)
        device = mesh.fabric.device
        return TensorParallel(module, plan, mesh.tensor, device, section.sequence_parallel, section.loss_parallel, segments, ties)

    layers = together(everyone, "splitting the layers of the stages", split, lambda made: made.remove(module))
    module.splits_tokens, module.split_rank = section.sequence_parallel, mesh.tensor.rank
    return layers


def _common_plan(module: PipelineModule, settings: Config, everyone: Communicator) -> Plan:
    """The plans of all stages as one. Collective."""

    def mine() -> tuple[Plan, list[str]]:
        names = module.whole_names if isinstance(module, PipelinedCausalLM) else None
        return plan_for(module, names, part=True), whole_experts(module, settings)

    plan, experts = together(everyone, "tensor plan", mine)
    told = exchange_values(everyone, "tensor plans of the stages", (dict(plan.styles), experts))
    styles = {name: style for other, _ in told for name, style in other.items()}
    merged = Plan(plan.origin, styles).without(name for _, names in told for name in names)
    if not merged.styles:
        raise ModelError(
            "no stage has an attention (q_proj, k_proj, v_proj, o_proj) or a pair of linear layers that could be split over mesh.tp "
            "ranks; set mesh.tp to 1"
        )
    return merged


def _check_ties(ties: dict[str, tuple[str, ...]], plan: Plan) -> None:
    """A tied weight is cut alike by all stages that use it."""
    for name, uses in ties.items():
        styles = {plan.styles.get(use.rpartition(".")[0]) for use in uses}
        if len(styles) > 1 and not styles <= {None, "vocabulary", "column_gather"}:
            raise ModelError(
                f"the tied weight '{name}' is split in one layer and not, or otherwise, in another ({', '.join(uses)}); set mesh.tp to 1"
            )


def share_stage_sequences(module: PipelineModule, settings: Config, mesh: Mesh, trains: bool) -> StageSequences | None:
    """Makes the `cp` ranks of `mesh` share the sequences of this rank's stages; None where cp is 1. Collective over them.

    Raises the same error on all ranks of a stage for a model whose attention cannot be exchanged.
    """
    name = attention_name(module, settings, mesh)
    if name is None:
        return None
    section = settings.sequence_parallel
    if section.batches == "cut" or section.disable_in_eval:
        raise ConfigError(
            f"mesh.cp is {mesh.degrees.cp} and mesh.pp {mesh.degrees.pp}: stages cut whole batches, in evaluation too; leave out "
            "sequence_parallel.batches and sequence_parallel.disable_in_eval"
        )
    group = sequence_group(name, module, settings, mesh, trains)
    if isinstance(module, PipelinedCausalLM):
        return StageAttention(module, group, name, module.stage_forward)
    if module.loss_weight is None:
        raise ConfigError(
            f"mesh.cp is {mesh.degrees.cp}: ranks have different numbers of targets of a sequence, and the mean over all of them needs "
            "PipelineModule(loss_weight=...), the number of targets in given labels"
        )
    return StageSequences(module, group)
