"""Keys and sections of DeepSpeed that have no typed field here, because the engine reads nothing from them.

A section is given with the names below it that are known, so that a misspelling inside it is still found; `None` leaves
it open. What switches a section on decides whether anything is said about it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zeroengine.config.spec import KeySpec, Kind, always, never, other_than, present, switched_on, switched_on_below

_MONITOR = "monitoring only, the training is the same"
_SPEED = "affects speed or memory only"
_CHANGED = "it would change what is trained"


@dataclass(frozen=True)
class Foreign:
    """A top-level key. `keys` names what is known below it (None: anything; empty: it is a plain value)."""

    name: str
    kind: Kind
    meaning: str
    reason: str
    asks: Callable[[Any], bool]
    keys: tuple[str, ...] | None = ()

    def rows(self) -> Iterator[KeySpec]:
        section = self.keys != ()
        yield KeySpec(
            self.name, self.kind, self.meaning, "section" if section else "", "", self.reason, self.asks,
            section=section, open=self.keys is None,
        )  # fmt: skip
        for key in self.keys or ():
            # The section speaks for its keys: nothing is said about them one by one.
            open_below = key in _OPEN_CHILDREN
            yield KeySpec(f"{self.name}.{key}", self.kind, "", "", "", self.reason, never, section=open_below, open=open_below)


_OPEN_CHILDREN = ("arg_mappings", "prof_ops", "throughput", "schedule_config", "model_info", "tuning_space")


def _ignored(name: str, meaning: str, reason: str, keys: str | None = "", asks: Callable[[Any], bool] = switched_on) -> Foreign:
    return Foreign(name, Kind.IGNORED, meaning, reason, asks, None if keys is None else tuple(keys.split()))


def _refused(name: str, meaning: str, reason: str, keys: str | None = None, asks: Callable[[Any], bool] = switched_on) -> Foreign:
    return Foreign(name, Kind.REFUSED, meaning, reason, asks, None if keys is None else tuple(keys.split()))


FOREIGN: tuple[Foreign, ...] = (
    _ignored("timers", "Throughput timer.", _MONITOR, "throughput", asks=never),
    _ignored(
        "autotuning", "Settings of the tuning mode of DeepSpeed's launcher.", "read by that launcher only",
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type "
        "tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
        "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
        "model_info model_info_path tuning_space",
    ),
    _ignored(
        "compile", "Compilation by DeepSpeed.", "affects speed only; compile the model with `torch.compile`",
        "enabled disable backend kwargs deepcompile free_activation free_activation_threshold offload_activation "
        "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
        "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
        "keep_all_input_tensors passes", asks=present,
    ),
    _ignored(
        "hybrid_engine", "Faster generation between training steps.", "affects the speed of generation only",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph",
    ),
    _ignored(
        "nebula", "Checkpoint service.", "checkpoints are written by the engine itself",
        "enabled enable_nebula_load nebula_load_path load_path persistent_storage_path persistent_time_interval "
        "num_of_version_in_retention",
    ),
    _ignored("datastates_ckpt", "Checkpoint service.", "checkpoints are written by the engine itself", None, present),
    _ignored("graph_harvesting", "CUDA graphs.", _SPEED),
    _ignored("sparse_gradients", "Sparse reduction of embedding gradients.", "the dense sum has the same values"),
    _ignored("disable_allgather", "Old switch.", "updated weights are always all-gathered"),
    _ignored("disable_python_gc", "Switch off Python's garbage collector.", "affects speed only"),
    _ignored("vocabulary_size", "Hint on the alignment of the vocabulary.", "affects speed only", asks=never),
    _ignored("log_level", "Level of the log.", "set the environment variable ZE_LOG_LEVEL", asks=present),
    _ignored(
        "zero_force_ds_cpu_optimizer", "Insist on one CPU optimizer for offload.",
        "the engine's update runs wherever the state lives", asks=never,
    ),
    _ignored(
        "seq_parallel_communication_data_type", "Type on the wire within sequence groups.",
        "gradients of sequence groups are reduced with the others, see `communication_data_type`",
        asks=other_than("fp32", None),
    ),
    _refused("amp", "NVIDIA Apex.", "Apex is not used; write `fp16` or `bf16`"),
    _refused(
        "fp8", "Training in fp8.", "the engine does not cast to fp8; convert the model's layers yourself, or remove it"
    ),
    _refused("sparse_attention", "Block-sparse attention.", _CHANGED + "; build it into the model", asks=present),
    _refused(
        "compression_training", "Quantisation and pruning while training.", _CHANGED + "; remove it",
        asks=switched_on_below,
    ),
    _refused("quantize_training", "Mixture of quantisation.", _CHANGED + "; remove it", asks=present),
    _refused("weight_quantization", "Quantised weights.", _CHANGED + "; remove it", asks=present),
    _refused("eigenvalue", "Curvature for mixture of quantisation.", "it belongs to `quantize_training`; remove it"),
    _refused("progressive_layer_drop", "Layers dropped at random.", _CHANGED + "; build it into the model"),
    _refused(
        "curriculum_learning", "Sequence length that grows.", "it changes the batches; build it into the data loader"
    ),
    _refused(
        "data_efficiency", "Curriculum sampling and token dropping.",
        "it changes the batches and the layers; build it into the data loader and the model",
    ),
    _refused("dynamic_train", "Early form of `data_efficiency`.", _CHANGED + "; remove it", asks=switched_on_below),
    _refused("expert_parallel", "Experts found and split automatically.", "write `mesh.ep`"),
    _refused("pipeline", "Settings of the pipeline.", "write `mesh.pp`", asks=always),
    _refused(
        "managed_gradient_accumulation", "False leaves accumulation to the script.",
        "leave it true and set `gradient_accumulation_steps` to 1 to step after every backward", "", other_than(True),
    ),
    _refused(
        "use_data_before_expert_parallelism", "Order of the ranks in expert groups.",
        "the order follows from `mesh`; remove it", "", other_than(False),
    ),
)  # fmt: skip

# Settings of models and training scripts that share the file in some projects (gpt-neox writes them with dashes).
_SCRIPTS = "is a setting of a model or a training script, which the engine does not read; keep it in a file of its own"
_OF_SCRIPTS = (
    "attention_dropout", "bias_gelu_fusion", "checkpoint_activations", "checkpoint_factor", "checkpoint_num_layers",
    "data_impl", "deepspeed_slurm", "distributed_backend", "eval_interval", "eval_iters", "hidden_dropout",
    "hidden_size", "keep_last_n_checkpoints", "launcher", "log_interval", "lr_decay_iters", "lr_decay_style",
    "max_position_embeddings", "no_weight_tying", "norm", "num_attention_heads", "num_layers", "pos_emb",
    "scaled_upper_triang_masked_softmax_fusion", "seq_length", "split", "synchronize_each_layer", "train_iters",
)  # fmt: skip

# Keys that do not exist, by full path or name, and the key or the advice to give instead.
RENAMED: dict[str, str] = {
    "max_grad_norm": "gradient_clipping",
    "max_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "optimizer.params.lr",
    "opt_level": "it belongs to Apex; mixed precision by `fp16` or `bf16` has no levels, remove it",
    "fp16.fp16": "fp16.enabled",
    "fp16_scale_tolerance": "the dynamic loss scale has no tolerance, remove it",
    "monitor_config": "monitors are sections of the top level: `tensorboard`, `wandb`, `csv_monitor`, `comet`",
    **{
        f"bf16.{name}": "bf16 has the range of fp32 and needs no loss scale; remove the key"
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
    "logging": "its keys belong to the top level: `steps_per_print`, `wall_clock_breakdown`",
    "disable_fused_adam": "the engine chooses the implementation of the optimizer, and the result is the same; remove it",
    "zero_optimization.verbose": "the level of the log is the environment variable ZE_LOG_LEVEL; remove the key",
    "cuda_visible_devices": "set the environment variable CUDA_VISIBLE_DEVICES",
    "comms_config": "comms_logger",
    "zero": "zero_optimization",
    "bfp16": "bf16",
    "model_parallel_size": "mesh.tp",
    "pipe_parallel_size": "mesh.pp",
    "fp16_enabled": "fp16.enabled",
    "bf16_enabled": "bf16.enabled",
    "stage3_param_persitance_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "cpu_offload_params": "zero_optimization.offload_param",
    "warmup": "scheduler.params.warmup_num_steps",
    **{name: f"it {_SCRIPTS}" for name in _OF_SCRIPTS},
}

# Booleans of `zero_optimization` that stand for a section.
OLD_FORMS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}

# Parameters that optimizers and schedules commonly take: known for finding misplaced keys and for the documentation.
OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay", "momentum", "adam_w_mode", "torch_adam", "bias_correction")
# Parameters that choose a kernel, and never reach the optimizer.
OPTIMIZER_KERNELS = ("use_triton",)
# Parameters of optimizers that are refused by name, see `names.py`.
COMPRESSED_PARAMS = (
    "freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min", "factor_threshold",
    "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper",
)  # fmt: skip
SCHEDULER_PARAMS = (
    "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "warmup_min_ratio",
    "cos_min_ratio", "last_batch_iteration", "lr_range_test_min_lr", "lr_range_test_step_size",
    "lr_range_test_step_rate", "lr_range_test_staircase", "cycle_min_lr", "cycle_max_lr", "cycle_first_step_size",
    "cycle_second_step_size", "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size",
    "decay_lr_rate", "decay_mom_rate", "cycle_momentum", "cycle_min_mom", "cycle_max_mom",
)  # fmt: skip
