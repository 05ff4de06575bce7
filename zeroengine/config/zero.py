"""The section `zero_optimization`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainValidator

from zeroengine.config.spec import Section, ignored, key, never, other_than, present, refused
from zeroengine.config.values import Count, Flag, Fraction, Params, PositiveInteger, Text, _integer, choice

Device = Annotated[Literal["none", "cpu", "nvme"], choice("none", "cpu", "nvme")]
_ONE_BUCKET = "the bucket is the unit of communication here, see `zero_optimization.bucket_size`"
_REARRANGED = "the mechanism here has no such step"
_QUANTIZED = "values sent in fewer bits change the result, and the engine sends them exactly; remove the key"


def _stage(value: object) -> int:
    if isinstance(value, (list, tuple)):
        raise ValueError("expected one stage out of 0, 1, 2, 3 (a list is for a tuner that tries several)")
    try:
        stage = _integer(0)(value)
    except ValueError:
        stage = -1
    if stage not in (0, 1, 2, 3):
        raise ValueError("expected 0, 1, 2 or 3")
    return stage


def _mics(value: object) -> int | None:
    """-1 is DeepSpeed's way of saying no."""
    if value is None:
        return None
    size = _integer(-1)(value)
    if size == 0:
        raise ValueError("expected a number of ranks, or -1 for none")
    return None if size == -1 else size


def _hpz(value: object) -> int:
    return max(1, _integer(0)(value))


class OffloadOptimizer(Section):
    """Where the optimizer state and the fp32 masters live between steps."""

    device: Device = key("none", "`none`, `cpu` or `nvme`.")
    nvme_path: Text | None = key(None, "Folder for the files of device `nvme`.")
    pin_memory: Flag = key(True, "Page-locked host memory, where an accelerator reads from it.")
    buffer_count: Count = key(4, "Device `nvme`: host buffers, each for one bucket's masters and state.")
    pipeline_read: Flag = key(True, "Device `nvme`: read the next bucket's state while one is updated.")
    pipeline_write: Flag = key(True, "Device `nvme`: write a bucket's state while the next one is updated.")
    ratio: Fraction = key(1.0, "Share of masters and state that leaves the device, in whole buckets.")
    fast_init: Flag = key(False, "Device `nvme`: claim disk space when it is written, and not at the start.")
    super_offload: Flag = ignored(False, "Overlapped update on the host.", "affects speed only")
    cpuadam_cores_perc: Fraction = ignored(0.8, "Share of the cores for `super_offload`.", "affects speed only")


class OffloadParam(Section):
    """Where stage 3 parameter shards live between uses."""

    device: Device = key("none", "`none`, `cpu` or `nvme`.")
    nvme_path: Text | None = key(None, "Folder for the files of device `nvme`.")
    pin_memory: Flag = key(True, "Page-locked host memory, where an accelerator reads from it.")
    buffer_count: Count = key(5, "Device `nvme`: host buffers, each for one bucket's shard.")
    buffer_size: Count = key(10**8, "Device `nvme`: most elements of a bucket.")
    max_in_cpu: Count = key(0, "Device `nvme`: elements of this rank's shards that stay in host memory.")


class ZeroSection(Section):
    """Sharding: what stays whole between uses, in what pieces it is moved, and where it lives."""

    stage: Annotated[int, PlainValidator(_stage)] = key(0, "0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.")
    bucket_size: PositiveInteger | None = key(
        None, "Elements of a bucket; null lets the engine choose, at most `reduce_bucket_size`.", ours=True
    )
    reduce_bucket_size: Count = key(5 * 10**8, "Upper bound on the elements of a bucket; 0: one parameter each.")
    overlap_comm: Flag | None = ignored(
        None, "Communicate while computing.", "communication always overlaps where it can; the result is the same",
        asks=other_than(True, None),
    )  # fmt: skip
    round_robin_gradients: Flag = ignored(False, "Spread gradient copies over ranks.", _REARRANGED)
    ignore_unused_parameters: Flag = key(True, "Parameters without a gradient are allowed; false makes one an error at the step.")

    stage3_prefetch_bucket_size: Count | None = key(
        None, "Stage 3: elements gathered ahead of use. Null: one bucket ahead.", "prefetch_bucket_size"
    )
    stage3_param_persistence_threshold: Count = key(0, "Stage 3: parameters with fewer elements stay whole.", "param_persistence_threshold")
    stage3_model_persistence_threshold: Count | None = key(
        None, "Stage 3: most elements that may stay whole altogether. Null: no bound.", "model_persistence_threshold"
    )
    stage3_max_live_parameters: Count = key(10**9, "Stage 3: most elements gathered at one time.", "max_live_parameters")
    stage3_max_reuse_distance: Count = key(
        0, "Stage 3: a parameter used again within this many elements is kept gathered.", "max_reuse_distance"
    )
    stage3_gather_16bit_weights_on_model_save: Flag = key(
        False, "Stage 3: let `save_16bit_model` and consolidated state dicts gather the weights.",
        "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    )  # fmt: skip

    zero_hpz_partition_size: Annotated[int, PlainValidator(_hpz)] = ignored(
        1, "Ranks of a secondary group that parameters are gathered from in backward (hpZ); 1 is off.",
        "it affects speed only; `mics_shard_size` keeps all gathers inside a group", asks=other_than(0, 1),
    )  # fmt: skip
    mics_shard_size: Annotated[int | None, PlainValidator(_mics)] = key(
        None, "Ranks that share one copy of the sharded state (hybrid sharding); null or -1: all."
    )
    offload_optimizer: OffloadOptimizer = key(None, "Where optimizer state lives.", factory=OffloadOptimizer)
    offload_param: OffloadParam = key(None, "Where stage 3 shards live.", factory=OffloadParam)

    allgather_bucket_size: Count = ignored(5 * 10**8, "Elements per all-gather.", _ONE_BUCKET)
    allgather_partitions: Flag = ignored(True, "All-gather updated weights.", "weights are always all-gathered")
    contiguous_gradients: Flag = ignored(True, "Gradients in one flat buffer.", "gradients always lie in flat buffers")
    reduce_scatter: Flag = ignored(
        True, "Reduce-scatter gradients.", "the engine chooses the cheaper form; the sum is the same to the last bit"
    )
    sub_group_size: Count = ignored(10**9, "Elements updated at a time.", "each bucket's shard is updated in one pass", asks=never)
    use_multi_rank_bucket_allreduce: Flag = ignored(True, "All-reduce buckets of several owners.", _ONE_BUCKET)
    load_from_fp32_weights: Flag = ignored(True, "Restore fp32 masters from the checkpoint.", "masters are always restored exactly")
    elastic_checkpoint: Flag = ignored(
        False, "Checkpoints for another number of ranks.", "every checkpoint loads on any number of ranks", asks=never
    )
    legacy_stage1: Flag = ignored(False, "Old form of stage 1.", "there is one form of stage 1")
    stage3_module_granularity_threshold: Count = ignored(0, "Modules gathered as one unit.", _ONE_BUCKET, "module_granularity_threshold")
    stage3_use_all_reduce_for_fetch_params: Flag = ignored(False, "Gather by all-reduce.", _REARRANGED, "use_all_reduce_for_fetch_params")
    stage3_allgather_sequential: Flag = ignored(False, "All-gather one parameter at a time.", _ONE_BUCKET, "allgather_sequential")
    mics_hierarchical_params_gather: Flag = ignored(False, "Two-level gather.", "affects speed only")
    memory_efficient_linear: Flag = ignored(
        True, "Own linear function.", "saved tensors are looked up in buckets, whatever the module", asks=never
    )
    pipeline_loading_checkpoint: Flag = ignored(False, "Overlap checkpoint reading.", "affects loading time only")
    override_module_apply: Flag = ignored(True, "Gather in `Module.apply`.", "`Module.apply` works on gathered values")
    log_trace_cache_warnings: Flag = ignored(False, "Log prefetch surprises.", "affects logging only")
    enable_sanity_checks: Flag = ignored(False, "Extra checks.", "the order of collectives is always checked (over NCCL once a step)")
    compute_grad_norm: Flag = ignored(True, "Compute the gradient norm.", "the norm is always known after a step")
    parameter_alignment: Flag = ignored(False, "Parameters start at aligned addresses.", "affects speed only")
    save_muon_momentum_buffer_in_memory: Flag = ignored(False, "Where Muon's momentum lives.", "affects memory only")
    leaf_module: Params | None = key(None, "Stage 3: modules gathered as one unit: `classes`, `names`, `name_suffixes`.", open_below=True)
    cpu_offload_use_pin_memory: Flag | None = ignored(None, "Old key that sets nothing.", "use `offload_optimizer.pin_memory`")

    zero_quantized_weights: Flag = refused(False, "Gather weights in int8 (qwZ).", _QUANTIZED)
    zero_quantized_nontrainable_weights: Flag = refused(False, "Gather frozen weights in int8.", _QUANTIZED)
    zero_quantized_gradients: Flag = refused(False, "Reduce gradients in int4/int8 (qgZ).", _QUANTIZED)
    zeropp_loco_param: Params | None = refused(None, "Error feedback of qgZ.", _QUANTIZED, present, open_below=True)
    zenflow: Params | None = refused(
        None, "Updates unimportant gradients late (ZenFlow).",
        "delayed updates change the result; remove the section", asks=present, open_below=True,
    )  # fmt: skip


__all__ = ["Device", "OffloadOptimizer", "OffloadParam", "ZeroSection"]
