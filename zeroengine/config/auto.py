"""`"auto"`: filled where the answer is known, refused by name where it is not. It never reaches the engine.

Known without being told: what follows from another key, and keys that affect speed or memory only, for which the
engine's default is its own choice. Everything else has to be told: `facts` maps a full key path (`optimizer.params.lr`)
or one of the names in `FACTS` to a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from zeroengine.config.batch import BATCH_KEYS
from zeroengine.config.canonical import AUTO, Canonical, Problem, leaves
from zeroengine.config.keys import KeyTable
from zeroengine.config.spec import Kind
from zeroengine.config.values import dtype_name, plain_flag, plain_number, show
from zeroengine.errors import ConfigError

FACTS: dict[str, str] = {
    "hidden_size": "width of the model, for the sizes of `zero_optimization`",
    "dtype": "`fp32`, `fp16` or `bf16`, for `fp16.enabled` and `bf16.enabled`",
    "train_batch_size": "samples a step",
    "train_micro_batch_size_per_gpu": "samples a rank and backward",
    "gradient_accumulation_steps": "backwards a step",
    "max_grad_norm": "for `gradient_clipping`",
    "lr": "for `optimizer.params.lr` and `scheduler.params.warmup_max_lr`",
    "betas": "for `optimizer.params.betas`",
    "eps": "for `optimizer.params.eps`",
    "weight_decay": "for `optimizer.params.weight_decay`",
    "warmup_num_steps": "for `scheduler.params.warmup_num_steps`",
    "total_num_steps": "for `scheduler.params.total_num_steps`",
}

_FACT_OF = {
    "gradient_clipping": "max_grad_norm",
    "scheduler.params.warmup_max_lr": "lr",
    **{f"optimizer.params.{name}": name for name in ("lr", "betas", "eps", "weight_decay")},
    **{f"scheduler.params.{name}": name for name in ("warmup_num_steps", "total_num_steps")},
}
_OWN_CHOICE = (
    *(f"zero_optimization.{name}" for name in (
        "bucket_size", "reduce_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "zero_hpz_partition_size",
    )),
    *(f"zero_optimization.{section}.{name}" for section in ("offload_optimizer", "offload_param") for name in (
        "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write",
    )),
    *(f"aio.{name}" for name in ("block_size", "queue_depth", "intra_op_parallelism", "thread_count")),
    *(f"fp16.{name}" for name in (
        "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale",
    )),
    *(f"mesh.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
    "steps_per_print", "wall_clock_breakdown", "communication_data_type", "data_types.grad_accum_dtype",
    "tensor_parallel.autotp_size", "sequence_parallel_size", "data_types.keep_in_fp32_modules", "seed",
)  # fmt: skip

_DEFAULT: Literal["default"] = "default"


class _Unanswered(Exception):
    """Nobody knows."""


def fill(read: Canonical, written: dict[str, Any], table: KeyTable, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Fills every "auto" in `read.values` and in `written` (what the user wrote); removes the key where the answer is
    the default. Returns the batch keys that stay open until the number of ranks is known."""
    _check_names(facts, table)
    undetermined: list[str] = []
    for path, value, holder in leaves(read.values):
        if value != AUTO:
            continue
        name = path.rpartition(".")[2]
        top = table.get(path.partition(".")[0])
        row = table.get(path)
        if top is not None and top.kind is not Kind.HONOURED and (row is None or row.kind is not Kind.HONOURED):
            continue
        try:
            answer = _answer(path, read.values, facts, ignored=row is not None and row.kind is not Kind.HONOURED)
        except _Unanswered:
            read.problems.append(Problem(read.spelled(path), "auto", _why(path)))
            holder.pop(name)
            continue
        if answer is _DEFAULT:
            holder.pop(name)
            undetermined += [path] if path in BATCH_KEYS else []
        else:
            holder[name] = answer
        _write(written, read.location(path), answer)
    return tuple(undetermined)


def _answer(path: str, values: dict[str, Any], facts: Mapping[str, Any], ignored: bool) -> Any:
    if path in facts:
        return facts[path]
    fact = _FACT_OF.get(path)
    if fact is not None and fact in facts:
        return facts[fact]
    if path in BATCH_KEYS or ignored:
        return _DEFAULT
    if path in ("fp16.enabled", "bf16.enabled"):
        return _precision(path.partition(".")[0], values, facts)
    width = plain_number(facts.get("hidden_size"))
    if width is not None and path.startswith("zero_optimization."):
        sizes = {
            "reduce_bucket_size": int(width * width),
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": int(10 * width),
        }
        if path.partition(".")[2] in sizes:
            return sizes[path.partition(".")[2]]
    if path in _OWN_CHOICE:
        return _DEFAULT
    if path == "scheduler.params.warmup_min_lr":
        return 0
    if path == "scheduler.params.warmup_max_lr":
        optimizer = values.get("optimizer")
        params = optimizer.get("params") if isinstance(optimizer, dict) else None
        rate = plain_number(params.get("lr")) if isinstance(params, dict) else None
        if rate is not None:
            return rate
    raise _Unanswered


def _precision(name: str, values: dict[str, Any], facts: Mapping[str, Any]) -> bool:
    """By the fact, or because the other precision is switched on and they exclude each other."""
    if "dtype" in facts:
        try:
            return dtype_name(facts["dtype"]) == name
        except ValueError as error:
            raise ConfigError(f"the fact dtype has the value {show(facts['dtype'])}: {error}") from None
    other = values.get("bf16" if name == "fp16" else "fp16")
    if isinstance(other, dict) and plain_flag(other.get("enabled")):
        return False
    raise _Unanswered


def _why(path: str) -> str:
    fact = _FACT_OF.get(path, "dtype" if path in ("fp16.enabled", "bf16.enabled") else "")
    known = f' (or the fact "{fact}" when loading)' if fact else ""
    return f'is "auto", and nothing tells the value; write a value{known}'


def _check_names(facts: Mapping[str, Any], table: KeyTable) -> None:
    for name in facts:
        parent = table.get(name.rpartition(".")[0])
        if name not in FACTS and name not in table and not (parent is not None and parent.open):
            raise ConfigError(f"unknown fact {name!r}: known are {', '.join(FACTS)} and full key paths")


def _write(written: dict[str, Any], location: tuple[str, ...], answer: Any) -> None:
    holder: Any = written
    for name in location[:-1]:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(holder, dict) and location[-1] in holder:
        if answer is _DEFAULT:
            holder.pop(location[-1])
        else:
            holder[location[-1]] = answer
