"""The configuration: read once, checked against one table of keys, never changed."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr, ValidationError, model_validator

from zeroengine.config.auto import fill
from zeroengine.config.batch import BATCH_KEYS, BatchSizes, resolve_batch
from zeroengine.config.canonical import Canonical, Problem, canonical
from zeroengine.config.elastic import ElasticitySection, solve
from zeroengine.config.keys import KeyTable
from zeroengine.config.monitoring import (
    CometSection,
    CommsLoggerSection,
    CsvMonitorSection,
    FlopsProfilerSection,
    JsonlMonitorSection,
    MonitorSection,
    TensorboardSection,
    TorchProfilerSection,
    WandbSection,
)
from zeroengine.config.names import RefusedValue
from zeroengine.config.sections import (
    ActivationCheckpointingSection,
    AioSection,
    Bf16Section,
    CheckpointSection,
    DataTypesSection,
    Fp16Section,
    HealthSection,
    MeshSection,
    MoeSection,
    OptimizerSection,
    SchedulerSection,
    SequenceParallelSection,
    TensorParallelSection,
    TorchAutocastSection,
)
from zeroengine.config.source import read
from zeroengine.config.spec import Section, ignored, key
from zeroengine.config.values import (
    Count,
    DtypeName,
    Flag,
    NonNegativeReal,
    PositiveInteger,
    PositiveReal,
    Steps,
    choice,
    plain,
    show,
)
from zeroengine.config.zero import ZeroSection
from zeroengine.errors import ConfigError
from zeroengine.logging import log_once

Reduction = Annotated[Literal["mean", "sum"], choice("mean", "sum")]


class Config(Section):
    """Everything the engine is told by its user. Keys are DeepSpeed's, with sections of its own.

    `Config.load` reads a file, a text or a dict. A `Config` does not depend on the number of ranks: batch sizes are
    worked out by `resolve_batch`.
    """

    train_batch_size: PositiveInteger | None = key(None, "Samples a step, over all data-parallel ranks.")
    train_micro_batch_size_per_gpu: PositiveInteger | None = key(None, "Samples a rank and backward.")
    gradient_accumulation_steps: PositiveInteger | None = key(None, "Backwards a step. Null: follows, else 1.")
    gradient_clipping: NonNegativeReal = key(0.0, "Largest global L2 norm of the gradients; 0 does not clip.")
    gradient_reduction: Reduction = key("mean", "How gradients of the ranks are combined: mean or sum.", "gradient_allreduce_op", ours=True)
    prescale_gradients: Flag = key(False, "Divide gradients before the reduction instead of after it.")
    gradient_predivide_factor: PositiveReal = key(1.0, "With `prescale_gradients`: what they are divided by before.")
    communication_data_type: DtypeName | None = key(None, "Type of gradients on the wire. Null: fp32.")
    seed: Count | None = key(None, "Seed of the engine's own random choices. Null: torch's seed.", ours=True)
    strict: Flag = key(True, "False turns unknown keys into a warning.", ours=True)

    zero_allow_untested_optimizer: Flag = ignored(
        False, "Allow optimizers of other classes.", "an optimizer that is not known to be element-wise gets whole parameters"
    )
    optimizer: OptimizerSection | None = key(None, "The optimizer. Null: given in code.")
    scheduler: SchedulerSection | None = key(None, "The learning-rate schedule. Null: given in code, or none.")
    fp16: Fp16Section = key(None, "Training in fp16.", factory=Fp16Section)
    bf16: Bf16Section = key(None, "Training in bf16.", "bfloat16", factory=Bf16Section)
    torch_autocast: TorchAutocastSection = key(None, "Autocast.", factory=TorchAutocastSection)
    data_types: DataTypesSection = key(None, "Types of auxiliary tensors.", factory=DataTypesSection)
    zero_optimization: ZeroSection = key(None, "Sharding.", factory=ZeroSection)
    mesh: MeshSection = key(None, "Degrees of parallelism.", ours=True, factory=MeshSection)
    moe: MoeSection = key(None, "Mixture of experts.", ours=True, factory=MoeSection)
    sequence_parallel_size: Count = key(1, "Another form of `mesh.cp`.")
    tensor_parallel: TensorParallelSection = key(None, "Another form of `mesh.tp`.", factory=TensorParallelSection)
    sequence_parallel: SequenceParallelSection = key(
        None, "Attention over a sequence that ranks share.", ours=True, factory=SequenceParallelSection
    )
    elasticity: ElasticitySection = key(None, "One batch for many numbers of ranks.", factory=ElasticitySection)
    health: HealthSection = key(None, "Waiting for other ranks.", ours=True, factory=HealthSection)
    activation_checkpointing: ActivationCheckpointingSection = key(
        None, "DeepSpeed's checkpointing function.", factory=ActivationCheckpointingSection
    )
    aio: AioSection = key(None, "Access to files of offloaded state.", factory=AioSection)
    checkpoint: CheckpointSection = key(None, "Saving and loading.", factory=CheckpointSection)
    tensorboard: TensorboardSection = key(None, "TensorBoard monitor.", factory=TensorboardSection)
    csv_monitor: CsvMonitorSection = key(None, "Monitor that writes CSV files.", factory=CsvMonitorSection)
    jsonl_monitor: JsonlMonitorSection = key(None, "Monitor that writes JSON lines.", ours=True, factory=JsonlMonitorSection)
    wandb: WandbSection = key(None, "Weights & Biases monitor.", factory=WandbSection)
    comet: CometSection = key(None, "Comet monitor.", factory=CometSection)
    comms_logger: CommsLoggerSection = key(None, "Log of collectives.", factory=CommsLoggerSection)
    flops_profiler: FlopsProfilerSection = key(None, "Count of floating-point operations.", factory=FlopsProfilerSection)
    torch_profiler: TorchProfilerSection = key(None, "Traces of torch.profiler.", ours=True, factory=TorchProfilerSection)
    monitor: MonitorSection = key(None, "Records of a run.", ours=True, factory=MonitorSection)

    steps_per_print: Steps = key(10, "A line of progress every so many steps; null or Infinity: never.")
    wall_clock_breakdown: Flag = key(False, "Time the phases of the step, and report them.")
    memory_breakdown: Flag = key(False, "Report memory with the progress.")
    dump_state: Flag = key(False, "Print the configuration and the layout when the engine is built.")
    dataloader_drop_last: Flag = key(False, "The loader made from `training_data` drops an incomplete last batch.")

    _written: dict[str, Any] | None = PrivateAttr(default=None)
    _undetermined: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _one_precision(self) -> Config:
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("`fp16.enabled` and `bf16.enabled` are both true; switch one of them off")
        return self

    @model_validator(mode="after")
    def _one_batch(self) -> Config:
        if not self.elasticity.enabled or self.elasticity.ignore_non_elastic_batch_info:
            return self
        for name in BATCH_KEYS:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` is given beside `elasticity`, which chooses it; remove one of the two, or set "
                    "`elasticity.ignore_non_elastic_batch_info` to true"
                )
        return self

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | Config,
        *,
        world_size: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Config:
        """Reads a configuration from a path, a JSON text, a mapping, or returns the `Config` given.

        `facts` answer `"auto"` (see `zeroengine.config.auto.FACTS`). With `world_size` the batch sizes are checked at
        once. Keys that are harmless and have no effect here are named in one warning. Raises `ConfigError` that names
        every key that is unknown, misplaced, of the wrong type, refused, or "auto" without an answer.
        """
        if isinstance(source, Config):
            config = source
        else:
            examined = examine(source, facts or {})
            examined.warn()
            config = examined.result()
        if world_size is not None:
            resolve_batch(config, config.data_parallel_size(world_size))
        return config

    @staticmethod
    @functools.cache
    def keys() -> KeyTable:
        """The table of all known keys."""
        return KeyTable(Config)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Batch keys that were written as "auto" and follow from the others once the number of ranks is known."""
        return self._undetermined

    @property
    def dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type in which weights are used."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that read different data. Raises `ConfigError` if the degrees of `mesh` do not fit `world_size`."""
        mesh = self.mesh
        apart = mesh.pp * mesh.cp * mesh.tp
        degrees = f"mesh.pp {mesh.pp} × mesh.cp {mesh.cp} × mesh.tp {mesh.tp}"
        if world_size % apart:
            raise ConfigError(f"{world_size} ranks cannot be divided by {degrees} = {apart}; change a degree or the number of ranks")
        size = world_size // apart
        shard = mesh.dp_shard
        if size % mesh.dp_replicate or (shard is not None and mesh.dp_replicate * shard != size):
            wanted = f"mesh.dp_replicate {mesh.dp_replicate}"
            wanted += "" if shard is None else f" × mesh.dp_shard {shard}"
            raise ConfigError(
                f"{world_size} ranks / ({degrees}) = {size} data-parallel ranks, which do not fit {wanted}; change a degree, or leave "
                "mesh.dp_shard out"
            )
        return size

    def world_sizes(self) -> tuple[int, ...] | None:
        """Numbers of ranks that `elasticity` admits; None where it is off, and any will do that the batch keys divide by."""
        if not self.elasticity.enabled:
            return None
        apart = self.mesh.pp * self.mesh.cp * self.mesh.tp
        return tuple(n * apart for n in solve(self.elasticity)[1])

    def to_dict(self, batch: BatchSizes | None = None) -> dict[str, Any]:
        """What the user wrote, with every "auto" filled, as a new dict. With `batch` the three batch keys are in it."""
        if self._written is not None:
            result = copy.deepcopy(self._written)
        else:
            result = plain(self.model_dump(exclude_unset=True))
        if batch is not None:
            result.update(zip(BATCH_KEYS, (batch.train, batch.micro, batch.accumulation), strict=True))
        return result


@dataclass
class Examined:
    """All that reading a configuration brought to light."""

    origin: str
    as_given: dict[str, Any]  # "auto" where the user wrote it
    written: dict[str, Any]  # "auto" filled
    read: Canonical
    config: Config | None = None
    problems: list[Problem] = field(default_factory=list)

    def result(self) -> Config:
        """The configuration. Raises `ConfigError` with all problems."""
        if self.problems or self.config is None:
            lines = [f"`{problem.path}` {problem.text}" if problem.path else problem.text for problem in self.problems]
            if len(lines) == 1:
                raise ConfigError(f"{self.origin}: {lines[0]}")
            raise ConfigError(f"{self.origin}: {len(lines)} problems:\n" + "\n".join(f"  - {line}" for line in lines))
        return self.config

    def warn(self) -> None:
        """One warning for all keys without effect, if there is a configuration to use."""
        by_reason: dict[str, list[str]] = {}
        for row in self.read.ignored:
            by_reason.setdefault(row.reason, []).append(f"`{self.read.spelled(row.path)}`")
        parts = [f"{', '.join(paths)} ({reason})" for reason, paths in by_reason.items()]
        if self.read.unknown:
            parts.append("unknown, allowed by `strict: false`: " + ", ".join(self.read.unknown))
        if parts and not self.problems:
            log_once(f"{self.origin}: keys without effect: " + "; ".join(parts))


def examine(source: str | os.PathLike[str] | Mapping[str, Any], facts: Mapping[str, Any]) -> Examined:
    """Reads and checks without raising for what is in the configuration (only if it cannot be read at all)."""
    origin = read(source)
    table = Config.keys()
    as_given = copy.deepcopy(origin.values)
    result = canonical(origin.values, table)
    undetermined = fill(result, origin.values, table, facts)
    examined = Examined(origin.origin, as_given, origin.values, result, problems=result.problems)
    typed = {name: value for name, value in result.values.items() if name in Config.model_fields}
    try:
        examined.config = Config.model_validate(typed)
        examined.config._written = origin.values
        examined.config._undetermined = undetermined
    except ValidationError as error:
        examined.problems += [_problem(details, result) for details in error.errors()]
    return examined


def _problem(details: Any, result: Canonical) -> Problem:
    path = ".".join(str(part) for part in details["loc"] if not str(part).startswith("function-"))
    cause = details.get("ctx", {}).get("error")
    if details["type"] == "missing":
        return Problem(result.spelled(path), "invalid", "is required in this section")
    if details["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(result.spelled(path), "invalid", f"expected an object, got {show(details['input'])}")
    text = str(cause) if cause is not None else str(details["msg"])
    if isinstance(details["input"], (dict, Section)):
        return Problem(result.spelled(path), "invalid", text)
    if isinstance(cause, RefusedValue):
        return Problem(result.spelled(path), "refused", f"is {show(details['input'])}: {text}")
    return Problem(result.spelled(path), "invalid", f"has the value {show(details['input'])}: {text}")
