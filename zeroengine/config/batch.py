"""Batch sizes: any two of the three keys give the third. Needs the true number of data-parallel ranks, so it is not
part of reading the configuration; the engine does it once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from zeroengine.config.elastic import ElasticitySection, sizes_for
from zeroengine.errors import ConfigError

BATCH_KEYS = _TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class BatchKeys(Protocol):
    """What `resolve_batch` reads of a configuration."""

    @property
    def train_batch_size(self) -> int | None: ...
    @property
    def train_micro_batch_size_per_gpu(self) -> int | None: ...
    @property
    def gradient_accumulation_steps(self) -> int | None: ...
    @property
    def undetermined(self) -> tuple[str, ...]: ...
    @property
    def elasticity(self) -> ElasticitySection: ...


@dataclass(frozen=True)
class BatchSizes:
    """Samples: `train` a step over all ranks = `micro` a rank and backward × `accumulation` × data-parallel ranks."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(config: BatchKeys, dp_world_size: int) -> BatchSizes:
    """The three sizes for `dp_world_size` ranks that read different data (a tensor, sequence or pipeline group counts
    once).

    With two keys given the third follows; with one of the two sizes alone, accumulation is 1; with `elasticity` switched on
    all three follow from it. Raises `ConfigError`
    with the arithmetic if the sizes do not divide or do not agree, or if neither size is given.
    """
    if dp_world_size < 1:
        raise ConfigError(f"the number of data-parallel ranks is at least 1, not {dp_world_size}")
    if config.elasticity.enabled:
        return BatchSizes(*sizes_for(config.elasticity, dp_world_size))
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    ranks = f"{dp_world_size} data-parallel rank{'s' * (dp_world_size > 1)}"
    if micro is not None and (train is None or steps is not None):
        product = micro * (steps or 1) * dp_world_size
        if train is not None and train != product:
            raise ConfigError(
                f"{_TRAIN} {train} is not {_MICRO} {micro} × {_STEPS} {steps} × {ranks} = {product}; "
                "remove one of the three keys or correct it"
            )
        return BatchSizes(product, micro, steps or 1)
    if train is None:
        given = f" ({_STEPS} {steps} alone does not fix them)" if steps is not None else ""
        auto = [name for name in (_TRAIN, _MICRO) if name in config.undetermined]
        why = f', "auto" ({", ".join(auto)}) has nothing to follow from' if auto else ""
        raise ConfigError(f"neither {_TRAIN} nor {_MICRO} is given{given}{why}; give one of them")
    if micro is not None:
        return BatchSizes(train, micro, _divided(train, _MICRO, micro, ranks, dp_world_size, _STEPS))
    return BatchSizes(train, _divided(train, _STEPS, steps or 1, ranks, dp_world_size, _MICRO), steps or 1)


def _divided(train: int, name: str, factor: int, ranks: str, dp_world_size: int, wanted: str) -> int:
    per_unit = factor * dp_world_size
    quotient, rest = divmod(train, per_unit)
    if rest or not quotient:
        lower, upper = quotient * per_unit, (quotient + 1) * per_unit
        nearest = f"{lower} or {upper}" if lower else str(upper)
        raise ConfigError(
            f"{_TRAIN} {train} / ({name} {factor} × {ranks}) = {train / per_unit:.6g}, but {wanted} must be "
            f"an integer of 1 or more; {nearest} would do"
        )
    return quotient
