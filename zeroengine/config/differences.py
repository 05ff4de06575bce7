"""Keys whose absence means something else here than in DeepSpeed 0.19.8."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """`here` and `deepspeed`: what happens without the key. `result`: whether another model comes out of it."""

    path: str
    here: str
    deepspeed: str
    why: str
    result: bool = False


DIFFERENCES = (
    Difference(
        "gradient_clipping", "gradients are not clipped", "clipped to an L2 norm of 1.0",
        "a key that is not written asks for nothing, as in torch; write 1.0 for DeepSpeed's result", True,
    ),
    Difference(
        "optimizer.params.adam_w_mode", "`Adam` with `weight_decay` is L2 regularisation, `AdamW` decoupled decay",
        "both are decoupled decay", "the names mean what they mean in torch; write `AdamW`, or `adam_w_mode`: true", True,
    ),
    Difference(
        "data_types.grad_accum_dtype", "16-bit gradients are accumulated in fp32", "in the type of the weights",
        "no bits are lost over micro-batches; write the key for the other result", True,
    ),
    Difference(
        "communication_data_type", "gradients are sent in the type of accumulation, fp32", "in the type of the weights",
        "no bits are lost over ranks; write the key for the other result and half the bytes", True,
    ),
    Difference(
        "data_types.keep_in_fp32_modules", "what the key names stays in fp32, and rotary frequencies",
        "also buffers that a transformers model names", "the key is written where everybody sees it", True,
    ),
    Difference(
        "steps_per_print", "a line every 10 steps", "no line", "progress is seen without asking; null switches it off",
    ),
    Difference(
        "zero_optimization.stage3_param_persistence_threshold", "0: every parameter is sharded", "100,000 elements",
        "small parameters travel in the bucket of their neighbours, so keeping them whole gains nothing",
    ),
    Difference(
        "zero_optimization.stage3_prefetch_bucket_size", "one bucket ahead", "50,000,000 elements",
        "buckets are small here",
    ),
    Difference(
        "zero_optimization.stage3_max_reuse_distance", "0: released after use", "1,000,000,000 elements",
        "memory over speed; a larger number keeps what is used again soon",
    ),
    Difference(
        "zero_optimization.bucket_size", "buckets of at most 4,194,304 elements", "`reduce_bucket_size`, 500,000,000",
        "the bucket is the unit of communication and of memory",
    ),
    Difference(
        "strict", "an unknown key is an error", "passed over at the top level, an error in most sections",
        "a misspelled key would otherwise train another model; false turns it into a warning", True,
    ),
)  # fmt: skip
