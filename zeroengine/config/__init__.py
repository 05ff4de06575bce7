"""The configuration: `Config.load` reads it, `resolve_batch` works out batch sizes, `describe` explains a file."""

from zeroengine.config.auto import FACTS
from zeroengine.config.batch import BatchSizes, resolve_batch
from zeroengine.config.config import Config
from zeroengine.config.report import KeyReport, describe, markdown
from zeroengine.config.sections import (
    ActivationCheckpointingSection,
    AioSection,
    Bf16Section,
    CheckpointSection,
    DataTypesSection,
    Fp16Section,
    HealthSection,
    MeshSection,
    OptimizerSection,
    SchedulerSection,
)
from zeroengine.config.values import FrozenMap
from zeroengine.config.zero import OffloadOptimizer, OffloadParam, ZeroSection

__all__ = [
    "FACTS",
    "ActivationCheckpointingSection",
    "AioSection",
    "BatchSizes",
    "Bf16Section",
    "CheckpointSection",
    "Config",
    "DataTypesSection",
    "Fp16Section",
    "FrozenMap",
    "HealthSection",
    "KeyReport",
    "MeshSection",
    "OffloadOptimizer",
    "OffloadParam",
    "OptimizerSection",
    "SchedulerSection",
    "ZeroSection",
    "describe",
    "markdown",
    "resolve_batch",
]
