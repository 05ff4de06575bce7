"""The sections of the configuration, except `zero_optimization`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, field_validator, model_validator

from zeroengine.config.names import optimizer_name, schedule_name
from zeroengine.config.spec import Section, ignored, key, never, present, refused
from zeroengine.config.values import (
    Count,
    DtypeName,
    Flag,
    FrozenMap,
    Integer,
    NonNegativeReal,
    Params,
    PositiveInteger,
    PositiveReal,
    Strings,
    Text,
    choice,
)


def _no_params() -> FrozenMap:
    return FrozenMap({})


_MASTERS = "masters and gradients stay in fp32, and fewer bits change the result; remove the key or set it to false"
_FILES = "reads and writes are always issued together and overlap"
_RECOMPUTE = "the model's own activation checkpointing is used as it is; this affects memory and speed only"


class OptimizerSection(Section):
    """The optimizer that the engine builds. `params` are checked when it is built."""

    type: Annotated[Text, AfterValidator(optimizer_name)] = key(
        ..., "Adam, AdamW, SGD, Lamb, Lion, Adagrad, Muon, Adafactor or any class of `torch.optim`."
    )
    params: Params = key(None, "Keyword arguments of the optimizer.", open_below=True, factory=_no_params)
    legacy_fusion: Flag = ignored(False, "Old fusion of Adam.", "affects speed only")


class SchedulerSection(Section):
    """The learning-rate schedule that the engine builds and steps. `params` are checked when it is built."""

    type: Annotated[Text, AfterValidator(schedule_name)] = key(
        ..., "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR or a class of `torch.optim.lr_scheduler`."
    )
    params: Params = key(None, "Keyword arguments of the schedule.", open_below=True, factory=_no_params)


class Fp16Section(Section):
    """fp16 weights with fp32 masters, and the loss scale that fp16 gradients need."""

    enabled: Flag = key(False, "Train in fp16.")
    auto_cast: Flag = ignored(False, "Cast inputs of the model to fp16.", "fp32 inputs are always cast", asks=never)
    loss_scale: NonNegativeReal = key(0.0, "Fixed loss scale; 0 scales dynamically.")
    initial_scale_power: Count = key(16, "A dynamic scale starts at 2 to this power.")
    loss_scale_window: PositiveInteger = key(1000, "Steps without overflow after which the scale is doubled.")
    hysteresis: PositiveInteger = key(2, "Overflows after which the scale is halved.")
    consecutive_hysteresis: Flag = key(False, "Count only overflows without a good step between them.")
    min_loss_scale: PositiveReal = key(1.0, "The dynamic scale never falls below this.")
    fp16_master_weights_and_grads: Flag = refused(False, "Masters and gradients in fp16.", _MASTERS)


class Bf16Section(Section):
    """bf16 weights with fp32 masters. There is no loss scale."""

    enabled: Flag = key(False, "Train in bf16.")
    immediate_grad_update: Flag = ignored(
        False, "Accumulate into fp32 in backward hooks.", "gradients always go to their fp32 buffer as they are made"
    )
    check_grad_overflow: Flag = ignored(True, "Skip steps with non-finite gradients.", "steps with non-finite gradients are always skipped")
    bf16_master_weights_and_grads: Flag = refused(False, "Masters and gradients in bf16.", _MASTERS)
    bf16_optimizer_states: Flag = refused(False, "Moments in bf16.", _MASTERS)


class TorchAutocastSection(Section):
    """`torch.autocast` around the forward: weights stay in the type of the model."""

    enabled: Flag = key(False, "Run the forward under `torch.autocast`.")
    dtype: DtypeName = key("bf16", "Type of the autocast region: bf16.")
    lower_precision_safe_modules: Strings | None = refused(
        None, "Modules that run in the lower type.", "torch's own lists say which operations do; remove the key", present,
    )  # fmt: skip

    @model_validator(mode="after")
    def _needs_no_loss_scale(self) -> TorchAutocastSection:
        if self.enabled and self.dtype == "fp16":
            raise ValueError("autocast in fp16 would need a loss scale; set `torch_autocast.dtype` to bf16, or train with `fp16`")
        return self


class DataTypesSection(Section):
    """Types of auxiliary tensors."""

    grad_accum_dtype: DtypeName | None = key(None, "Type of gradient accumulation. Null: fp32.")
    param_dtype: DtypeName | None = refused(
        None, "Type of the weights.", "the type of the weights follows from `fp16` or `bf16`; remove the key"
    )
    buffer_dtype: DtypeName | None = refused(
        None,
        "Type of the buffers.",
        "buffers follow the weights, except rotary frequencies and what a module names in `fp32_buffers`; remove the key",
    )
    keep_in_fp32_modules: Strings | None = key(
        None, "Modules whose parameters and buffers stay in fp32 in 16-bit training: a part of the path, or the whole with *."
    )


class ActivationCheckpointingSection(Section):
    """Options of DeepSpeed's own checkpointing function; only models that call it, and pipelines that recompute, notice them."""

    partition_activations: Flag = ignored(False, "Shard saved activations over tensor ranks.", _RECOMPUTE)
    cpu_checkpointing: Flag = key(
        False, "Inputs of recomputed segments wait for backward in memory of the host. On a run whose device is the CPU they are there."
    )
    contiguous_memory_optimization: Flag = ignored(False, "Saved activations in one buffer.", _RECOMPUTE)
    number_checkpoints: Count | None = ignored(None, "Checkpoints, to size that buffer.", _RECOMPUTE)
    synchronize_checkpoint_boundary: Flag = ignored(False, "Synchronise at boundaries.", _RECOMPUTE)
    profile: Flag = ignored(False, "Time checkpointed functions.", _RECOMPUTE)


class AioSection(Section):
    """How files of offloaded state are accessed."""

    block_size: PositiveInteger = key(1 << 20, "Bytes of one read or write, a multiple of 4096.")
    queue_depth: PositiveInteger = key(8, "Reads and writes in flight at a time, for each of `intra_op_parallelism`.")
    intra_op_parallelism: PositiveInteger = key(1, "Factor on `queue_depth`.")
    thread_count: Count | None = ignored(None, "Old name of `intra_op_parallelism`.", "write `aio.intra_op_parallelism`")
    single_submit: Flag = ignored(False, "Submit requests one by one.", _FILES, asks=never)
    overlap_events: Flag = ignored(True, "Submit while others complete.", _FILES, asks=never)
    use_gds: Flag = ignored(False, "Between disk and GPU without host memory.", "data passes through host memory; affects speed only")

    @field_validator("block_size")
    @classmethod
    def _whole_pages(cls, value: int) -> int:
        if value % 4096:
            raise ValueError("expected a multiple of 4096")
        return value


TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], choice("Ignore", "Warn", "Fail")]


class ParallelWriteSection(Section):
    pipeline_stage: Flag = ignored(False, "Stages write in parallel.", "ranks always write in parallel")


class CheckpointSection(Section):
    """Saving and loading."""

    tag_validation: TagValidation = key("Warn", "What to do when ranks give different tags: Ignore, Warn, Fail.")
    load_universal: Flag = ignored(
        False, "Load a converted checkpoint.", "every checkpoint loads on any number of ranks without conversion"
    )
    use_node_local_storage: Flag = key(False, "Save to storage of the node; only where all ranks run on one host.")
    parallel_write: ParallelWriteSection = key(None, "Parallel writing.", factory=ParallelWriteSection)


class MeshSection(Section):
    """Degrees of parallelism. Their product is the number of ranks; `ep` folds over the data-parallel ranks."""

    pp: PositiveInteger = key(1, "Pipeline stages.", ours=True)
    pp_schedule: str = key("1f1b", "Schedule of a causal LM that is given whole and cut into `pp` stages.", ours=True)
    pp_virtual_stages: PositiveInteger | None = key(None, "Stages on each rank then. Null: as the schedule wants.", ours=True)
    dp_replicate: PositiveInteger = key(1, "Replicas of the sharded state.", ours=True)
    dp_shard: PositiveInteger | None = key(None, "Ranks that share one state. Null: all the rest.", ours=True)
    cp: PositiveInteger = key(1, "Ranks that share one sequence.", ours=True)
    tp: PositiveInteger = key(1, "Ranks that share each layer.", ours=True)
    ep: PositiveInteger = key(1, "Ranks that share the experts.", ours=True)


DispatchType = Annotated[Literal["same", "bf16", "fp8"], choice("same", "bf16", "fp8")]


class MoeSection(Section):
    """Experts that `mesh.ep` ranks share."""

    dispatch_dtype: DispatchType = key(
        "same", "Type of tokens on their way: same (the model's), bf16, or fp8 (out with a factor a token; back bf16).", ours=True
    )
    two_hop: Flag = key(False, "Tokens travel inside a node first and then between nodes.", ours=True)
    ranks_per_node: PositiveInteger | None = key(None, "Ranks that share experts on one node, for `two_hop`. Null: as launched.", ours=True)
    copies: Flag = key(False, "Copy busy experts for the length of a layer so that all ranks compute alike.", ours=True)
    copies_above: PositiveReal = key(1.0, "Copies are made where the busiest rank has more than this many times the mean.", ours=True)
    bias_speed: NonNegativeReal = key(
        0.0, "Step of the bias that balances Hugging Face's DeepSeek-V3 routers; 0 leaves it alone.", ours=True
    )


SequenceAttention = Annotated[Literal["ulysses", "ring", "usp"], choice("ulysses", "ring", "usp")]
SequencePlacement = Annotated[Literal["zigzag", "contiguous"], choice("zigzag", "contiguous")]
SequenceBatches = Annotated[Literal["whole", "cut"], choice("whole", "cut")]


class SequenceParallelSection(Section):
    """How the `mesh.cp` ranks of a sequence attend to all of it."""

    attention: SequenceAttention | None = key(
        None,
        "ulysses (ranks trade tokens for heads), ring (keys travel), usp (both). null: what the model is built with, or ulysses.",
        ours=True,
    )
    ulysses: PositiveInteger | None = key(None, "Ranks that trade heads, with `usp`; the rest is the ring.", ours=True)
    layout: SequencePlacement = key("zigzag", "Placement along a ring: zigzag (equal causal work) or contiguous.", ours=True)
    batches: SequenceBatches = key(
        "whole",
        "whole: ranks of a sequence are given the same batch, which the engine cuts; cut: each is given its own tokens, the next "
        "ones on the next rank, and the loss over the ranks is the script's.",
        ours=True,
    )
    disable_in_eval: Flag = key(
        False, "In evaluation mode each rank runs whole batches of its own, with the model's own attention.", ours=True
    )

    @model_validator(mode="after")
    def _degree_belongs_to_usp(self) -> SequenceParallelSection:
        if (self.ulysses is not None) != (self.attention == "usp"):
            raise ValueError('`ulysses` and `attention: "usp"` go together: usp splits `mesh.cp` into ulysses x ring')
        return self


class HealthSection(Section):
    """How long ranks wait for one another."""

    comm_timeout: PositiveReal = key(10.0, "Seconds after which ranks that diverged, died or stopped end the job with a report.", ours=True)
    stall_timeout: PositiveReal = key(600.0, "Seconds that a live rank may compute between two collectives.", ours=True)

    @model_validator(mode="after")
    def _ordered(self) -> HealthSection:
        if self.stall_timeout < self.comm_timeout:
            raise ValueError(f"stall_timeout ({self.stall_timeout:g} s) is shorter than comm_timeout ({self.comm_timeout:g} s)")
        return self


_PLAN = "layers are split as the model's own plan says; a plan cannot be given in the configuration"


class TensorParallelSection(Section):
    """DeepSpeed's way to write `mesh.tp`."""

    autotp_size: Count = key(0, "Tensor-parallel degree; 0 and 1 are off. The same as `mesh.tp`.")
    sequence_parallel: Flag = key(False, "Split activations between the layers along the sequence as well (Megatron-SP).", ours=True)
    loss_parallel: Flag = key(
        False, "Leave logits cut along the vocabulary and compute the loss from the parts; the model returns its part.", ours=True
    )
    check_replicas_every: Count = key(
        0, "Steps between two comparisons of the parameters that all tensor-parallel ranks hold whole; 0 is never.", ours=True
    )
    tp_overlap_comm: Flag = ignored(False, "Overlap tensor-parallel communication.", "affects speed only")
    dtype: DtypeName | None = ignored(None, "Type of the weights.", "the type follows from `fp16` or `bf16`")
    tp_grain_size: Integer = ignored(1, "Multiple to which split sizes are rounded.", "affects speed only")
    keep_module_on_host: Flag = ignored(False, "Split on the host.", "affects start-up memory only")
    replace_with_kernel_inject: Flag = ignored(False, "Inject kernels.", "affects speed only", "kernel_inject")
    partition_config: Params | None = refused(None, "Plan of the split.", _PLAN, open_below=True)
    preset_model: Text | None = refused(None, "Named plan of the split.", _PLAN)
    injection_policy_tuple: Strings | None = refused(None, "Old form of a plan.", _PLAN)
