"""What the stand-in has: modules of `deepspeed`, their names, and where each is found. A name that is not in the table is an
AttributeError; what is refused says why.

A target is "module:attribute", "module", or a 1-tuple with the value itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = "0.19.8"
"""The release whose surface this is; programs compare it to know what they may call."""

Target = str | tuple[Any]

_HERE = "zeroengine.integrations.standin"
_CALLS, _TOOLS, _GROUPS, _SEQUENCES = (f"{_HERE}.{name}" for name in ("calls", "tools", "groups", "sequences"))
_ENGINE = {"DeepSpeedEngine": "zeroengine.engine.engine:ZeroEngine"}
_OPTIMIZER = "zeroengine.optim.optimizer:ZeroOptimizer"
_PARTITIONED = "zeroengine.zero.residency"
_ZERO: dict[str, Target] = {
    "Init": "zeroengine.zero:Init",
    "GatheredParameters": "zeroengine.zero:GatheredParameters",
    "register_external_parameter": f"{_TOOLS}:register_external_parameter",
    "unregister_external_parameter": f"{_TOOLS}:register_external_parameter",
}
_SAFE = (
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param",
    "safe_get_local_grad", "safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state",
    "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module",
)  # fmt: skip
_OF_GROUPS = ("group", "rank", "world_size")
_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_PIPE: dict[str, Target] = {
    "PipelineModule": f"{_HERE}.pipes:PipelineModule",
    **{name: f"zeroengine.pipe:{name}" for name in ("LayerSpec", "TiedLayerSpec")},
}
_TOPOLOGIES = ("ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology")
_CHECKPOINTING = (
    "checkpoint", "non_reentrant_checkpoint", "configure", "is_configured", "reset", "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed", "CheckpointFunction",
)  # fmt: skip
_NAMES_OF_OPTIMIZERS: dict[str, Target] = {
    "ADAM_OPTIMIZER": ("adam",), "ADAMW_OPTIMIZER": ("adamw",), "LAMB_OPTIMIZER": ("lamb",), "ADAGRAD_OPTIMIZER": ("adagrad",),
    "LION_OPTIMIZER": ("lion",), "MUON_OPTIMIZER": ("muon",), "ONEBIT_ADAM_OPTIMIZER": ("onebitadam",),
    "ONEBIT_LAMB_OPTIMIZER": ("onebitlamb",), "ZERO_ONE_ADAM_OPTIMIZER": ("zerooneadam",),
    "DEEPSPEED_OPTIMIZERS": (["adam", "adamw", "lamb", "adagrad", "lion", "muon", "sgd"],),
}  # fmt: skip

NAMES: Mapping[str, Mapping[str, Target]] = {
    "deepspeed": {
        "__version__": (VERSION,),
        "version": (VERSION,),
        "initialize": f"{_CALLS}:initialize",
        "tp_model_init": f"{_CALLS}:tp_model_init",
        "init_distributed": f"{_HERE}.startup:init_distributed",
        "add_config_arguments": "zeroengine.engine.initialize:add_config_arguments",
        "DeepSpeedConfig": f"{_CALLS}:DeepSpeedConfig",
        "DeepSpeedConfigError": "zeroengine.errors:ConfigError",
        "PipelineEngine": "zeroengine.engine.pipeline:PipelineEngine",
        "DeepSpeedOptimizer": _OPTIMIZER,
        "ZeROOptimizer": _OPTIMIZER,
        "OnDevice": f"{_TOOLS}:OnDevice",
        "get_accelerator": f"{_HERE}.accelerator:get_accelerator",
        "logger": "zeroengine.logging:logger",
        "log_dist": f"{_TOOLS}:log_dist",
        "zero": "deepspeed.runtime.zero",
        "dist": "deepspeed.comm",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        **_ENGINE,
        **{name: _PIPE[name] for name in ("PipelineModule",)},
        **_NAMES_OF_OPTIMIZERS,
    },
    "deepspeed.accelerator": {"get_accelerator": f"{_HERE}.accelerator:get_accelerator"},
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": {"clone_tensors_for_torch_save": f"{_TOOLS}:clone_tensors_for_torch_save"},
    "deepspeed.checkpointing": {n: f"{_HERE}.recompute:{n}" for n in _CHECKPOINTING},
    "deepspeed.comm": {
        "init_distributed": f"{_HERE}.startup:init_distributed",
        "is_initialized": f"{_HERE}.startup:is_initialized",
        "get_local_rank": "zeroengine.comm:get_local_rank",
        "get_world_group": f"{_GROUPS}:world_group",
        "get_all_ranks_from_group": f"{_GROUPS}:ranks_of",
        "get_global_rank": f"{_GROUPS}:global_rank",
        "has_all_gather_into_tensor": f"{_TOOLS}:yes",
        "has_reduce_scatter_tensor": f"{_TOOLS}:yes",
        "allgather_fn": f"{_GROUPS}:all_gather_into",
        "reduce_scatter_fn": f"{_GROUPS}:reduce_scatter_into",
        "inference_all_reduce": "torch.distributed:all_reduce",
    },
    "deepspeed.comm.comm": {"init_distributed": f"{_HERE}.startup:init_distributed"},
    "deepspeed.constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": (29500,),
        "CROSS_RANK": ("CROSS_RANK",),
        "CROSS_SIZE": ("CROSS_SIZE",),
    },
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": (".deepspeed_env",)},
    "deepspeed.moe": {},
    "deepspeed.moe.layer": {"MoE": "zeroengine.moe.layer:MoE"},
    "deepspeed.moe.utils": {
        "is_moe_param": "zeroengine.moe.utils:is_moe_param",
        "split_params_into_different_moe_groups_for_optimizer": (
            "zeroengine.moe.utils:split_params_into_different_moe_groups_for_optimizer"
        ),
    },
    "deepspeed.ops": {},
    "deepspeed.ops.adam": {
        "FusedAdam": "zeroengine.ops.adam:FusedAdam",
        "CPUAdam": "zeroengine.ops.adam:CPUAdam",
        "DeepSpeedCPUAdam": "zeroengine.ops.adam:CPUAdam",
    },
    "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": "zeroengine.ops.adagrad:CPUAdagrad"},
    "deepspeed.ops.lion": {
        "FusedLion": "zeroengine.ops.lion:FusedLion",
        "DeepSpeedCPULion": "zeroengine.ops.lion:CPULion",
    },
    "deepspeed.ops.lamb": {"FusedLamb": "zeroengine.optim.lamb:Lamb"},
    "deepspeed.pipe": _PIPE,
    "deepspeed.runtime": {"DeepSpeedOptimizer": _OPTIMIZER, "ZeROOptimizer": _OPTIMIZER},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {n: f"{_HERE}.recompute:{n}" for n in _CHECKPOINTING},
    "deepspeed.runtime.config": {
        "DeepSpeedConfig": f"{_CALLS}:DeepSpeedConfig",
        "DeepSpeedConfigError": "zeroengine.errors:ConfigError",
        **_NAMES_OF_OPTIMIZERS,
    },
    "deepspeed.runtime.dataloader": {"RepeatingLoader": f"{_TOOLS}:RepeatingLoader"},
    "deepspeed.runtime.engine": _ENGINE,
    "deepspeed.runtime.lr_schedules": {
        "VALID_LR_SCHEDULES": (list(_SCHEDULES),),
        **{name: f"zeroengine.optim.schedules:{name}" for name in _SCHEDULES},
    },
    "deepspeed.runtime.pipe": {**_PIPE, "ProcessTopology": f"{_HERE}.pipes:ProcessTopology"},
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": "zeroengine.engine.pipeline:PipelineEngine"},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": {name: f"{_HERE}.pipes:{name}" for name in _TOPOLOGIES},
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "initialize_sequence_parallel": f"{_SEQUENCES}:initialize_sequence_parallel",
        **{f"get_sequence_parallel_{what}": f"{_SEQUENCES}:get_{what}" for what in _OF_GROUPS},
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "UlyssesSPAttentionHF": f"{_SEQUENCES}:UlyssesSPAttentionHF",
        "UlyssesSPDataLoaderAdapter": f"{_SEQUENCES}:data_loader",
    },
    "deepspeed.runtime.utils": {
        "see_memory_usage": f"{_TOOLS}:see_memory_usage",
        "set_random_seed": f"{_TOOLS}:set_random_seed",
    },
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.config": {"ZeroStageEnum": f"{_TOOLS}:ZeroStageEnum"},
    "deepspeed.runtime.zero.offload_config": {
        "OffloadDeviceEnum": f"{_TOOLS}:OffloadDeviceEnum",
        "OffloadStateTypeEnum": f"{_TOOLS}:OffloadStateTypeEnum",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        "ZeroParamStatus": f"{_PARTITIONED}:ZeroParamStatus",
        # transformers exchanges the first while it builds a model; no function of torch is wrapped here, so nobody calls it.
        "zero_wrapper_for_fp_tensor_constructor": f"{_TOOLS}:unwrapped",
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": f"{_HERE}.accelerator:get_accelerator",
    },
    "deepspeed.runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": _OPTIMIZER},
    "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": _OPTIMIZER},
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": {"DistributedAttention": "zeroengine.sequence.layer:DistributedAttention"},
    "deepspeed.utils": {
        **{name: f"zeroengine.utils:{name}" for name in _SAFE},
        "logger": "zeroengine.logging:logger",
        "log_dist": f"{_TOOLS}:log_dist",
        "RepeatingLoader": f"{_TOOLS}:RepeatingLoader",
        "OnDevice": f"{_TOOLS}:OnDevice",
        "instrument_w_nvtx": f"{_TOOLS}:unwrapped",
        "is_initialized": "torch.distributed:is_initialized",
    },
    "deepspeed.utils.groups": {
        "get_data_parallel_group": f"{_GROUPS}:world_group",
        "get_data_parallel_rank": "torch.distributed:get_rank",
        "get_data_parallel_world_size": "torch.distributed:get_world_size",
        "_get_data_parallel_group": f"{_GROUPS}:world_group",
        "_get_data_parallel_rank": "torch.distributed:get_rank",
        "_get_data_parallel_world_size": "torch.distributed:get_world_size",
        **{f"get_sequence_parallel_{what}": f"{_SEQUENCES}:get_{what}" for what in _OF_GROUPS},
        **{f"_get_sequence_parallel_{what}": f"{_SEQUENCES}:get_{what}" for what in _OF_GROUPS},
    },
    "deepspeed.utils.logging": {"logger": "zeroengine.logging:logger", "log_dist": f"{_TOOLS}:log_dist"},
    "deepspeed.utils.zero_to_fp32": {
        name: f"{_HERE}.consolidate:{name}"
        for name in (
            "get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint",
            "convert_zero_checkpoint_to_fp32_state_dict",
        )
    },
}  # fmt: skip

FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "deepspeed.comm": ("zeroengine.comm", "torch.distributed"),
    "deepspeed.comm.comm": ("zeroengine.comm", "torch.distributed"),
}
"""Modules of which `deepspeed` names are taken as they are."""

_INFERENCE = "zeroengine trains; serve the saved weights with an inference engine"
_KERNEL = "a model-specific kernel of DeepSpeed; use torch's or the model's own layers (scaled_dot_product_attention)"
_CHANGES = "it changes the model or the data; build it into them"

REFUSED_CALLS: Mapping[str, str] = {
    "deepspeed.init_inference": _INFERENCE,
    "deepspeed.InferenceEngine": _INFERENCE,
    "deepspeed.DeepSpeedTransformerLayer": _KERNEL,
    "deepspeed.DeepSpeedTransformerConfig": _KERNEL,
    "deepspeed.replace_transformer_layer": _KERNEL,
    "deepspeed.revert_transformer_layer": _KERNEL,
}
REFUSED_MODULES: Mapping[str, str] = {
    "deepspeed.inference": _INFERENCE,
    "deepspeed.module_inject": _INFERENCE,
    "deepspeed.compression": f"quantisation and pruning: {_CHANGES}",
    "deepspeed.ops.sparse_attention": _KERNEL,
    "deepspeed.ops.transformer": _KERNEL,
    "deepspeed.ops.op_builder": "zeroengine compiles its operations itself when they are first used; `zerorun env` reports them",
    "deepspeed.runtime.data_pipeline": f"curriculum sampling and token dropping: {_CHANGES}",
    "deepspeed.runtime.domino": _KERNEL,
    "deepspeed.runtime.fp16": "fp16 is asked for in the configuration; its optimizer classes are not for use by themselves",
    "deepspeed.autotuning": "tuning by trial runs is not a part of zeroengine",
    "deepspeed.compile": "passes over compiled graphs are not a part of zeroengine; compile the model with torch.compile",
    "deepspeed.profiling": "a profile is asked for in the configuration (`flops_profiler`); elsewhere use torch.utils.flop_counter",
    "deepspeed.io": "zeroengine writes checkpoints itself, through torch.distributed.checkpoint",
    "deepspeed.nvme": "zeroengine has no tuning of disks",
}
