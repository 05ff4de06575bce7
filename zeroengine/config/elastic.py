"""`elasticity`: one global batch for every number of ranks that a job may run on.

The batch is chosen once, from the section alone, so that it never depends on how many ranks there happen to be; what
changes with them is the micro-batch and the accumulation. So the learning rate and its schedule stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from zeroengine.config.spec import Section, ignored, key, refused
from zeroengine.config.values import Flag, NonNegativeReal, PositiveInteger
from zeroengine.errors import ConfigError

_MOST = 1 << 22  # of ranks, in a search
_COUNTED = "sizes count data-parallel ranks, wherever they run; give the degrees in `mesh` and remove the key"


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("expected a list of integers, as in [2, 4, 6]")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in value):
        raise ValueError("expected integers of 1 or more")
    return tuple(sorted(set(value)))


def _version(value: Any) -> float:
    if value not in (0.1, 0.2):
        raise ValueError("the versions are 0.1 and 0.2; they mean the same here")
    return float(value)


class ElasticitySection(Section):
    """A global batch that many numbers of ranks can train with. The two batch sizes and the accumulation follow from it."""

    enabled: Flag = key(False, "Choose the batch so that the number of ranks may change.")
    max_train_batch_size: PositiveInteger = key(2000, "Samples a step, at most.")
    micro_batch_sizes: Annotated[tuple[int, ...], BeforeValidator(_sizes)] = key((2, 4, 6), "Samples a rank and backward that may be used.")
    min_gpus: PositiveInteger = key(1, "Fewest data-parallel ranks.")
    max_gpus: PositiveInteger = key(10000, "Most data-parallel ranks.")
    min_time: NonNegativeReal = ignored(0.0, "Minutes between changes.", "the launcher changes size when hosts come or go")
    prefer_larger_batch: Flag = key(True, "Of equal choices: the larger batch, and the larger micro-batch.")
    ignore_non_elastic_batch_info: Flag = key(False, "Pass over the batch keys beside this section; false: they are an error.")
    version: Annotated[float, BeforeValidator(_version)] = key(0.2, "0.1 or 0.2, which mean the same here.")
    model_parallel_size: PositiveInteger = refused(1, "Ranks that share a model.", _COUNTED)
    num_gpus_per_node: PositiveInteger = refused(1, "Ranks that are added or removed at a time.", _COUNTED)

    @model_validator(mode="after")
    def _ordered(self) -> ElasticitySection:
        if self.enabled and self.max_gpus < self.min_gpus:
            raise ValueError(f"max_gpus {self.max_gpus} is less than min_gpus {self.min_gpus}")
        if self.enabled and self.max_train_batch_size < self.micro_batch_sizes[0]:
            limit, least = self.max_train_batch_size, self.micro_batch_sizes[0]
            raise ValueError(f"max_train_batch_size {limit} has no room for one micro-batch of {least}")
        return self


def admissible(batch: int, micro_batches: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """Numbers of ranks from `low` to `high` that `batch` can be divided over in whole micro-batches of some size."""
    units = {batch // micro for micro in micro_batches if batch % micro == 0}
    top = min(high, max(units, default=0), _MOST)
    return tuple(n for n in range(low, top + 1) if any(unit % n == 0 for unit in units))


def _rich_numbers(limit: int) -> Iterator[int]:
    """Highly composite numbers up to `limit`: each has more divisors than any smaller one. Their prime factors are the first
    primes, with exponents that never rise, so only such products are looked at."""
    primes = (2, 3, 5, 7, 11, 13, 17, 19, 23)
    products: list[tuple[int, int]] = []

    def extend(value: int, divisors: int, prime: int, most: int) -> None:
        products.append((value, divisors))
        if prime == len(primes):
            return
        power = value
        for exponent in range(1, most + 1):
            power *= primes[prime]
            if power > limit:
                return
            extend(power, divisors * (exponent + 1), prime + 1, exponent)

    extend(1, 1, 0, 64)
    most = 0
    for value, divisors in sorted(products):
        if divisors > most:
            most = divisors
            yield value


@lru_cache(maxsize=64)
def _solved(micro_batches: tuple[int, ...], limit: int, low: int, high: int, larger: bool) -> tuple[int, tuple[int, ...]]:
    units = {*micro_batches, math.lcm(*micro_batches)}
    batches = {unit * max(_rich_numbers(limit // unit)) for unit in units if unit <= limit}
    found = [(batch, admissible(batch, micro_batches, low, high)) for batch in sorted(batches)]
    return max(found, key=lambda pair: (len(pair[1]), pair[0] if larger else -pair[0]))


def solve(section: ElasticitySection) -> tuple[int, tuple[int, ...]]:
    """The global batch in samples and the numbers of data-parallel ranks that it can be trained with, rising.

    Of multiples of a micro-batch, or of all of them, by a highly composite number, the one that most numbers of ranks divide.
    Raises `ConfigError` where none is within `min_gpus` and `max_gpus`.
    """
    batch, ranks = _solved(
        section.micro_batch_sizes, section.max_train_batch_size, section.min_gpus, section.max_gpus, section.prefer_larger_batch
    )
    if not ranks:
        raise ConfigError(
            f"`elasticity`: no number of ranks from min_gpus {section.min_gpus} to max_gpus {section.max_gpus} divides a batch of at most "
            f"{section.max_train_batch_size} samples into micro-batches of {', '.join(map(str, section.micro_batch_sizes))}"
        )
    return batch, ranks


def sizes_for(section: ElasticitySection, ranks: int) -> tuple[int, int, int]:
    """(global batch, micro-batch, accumulation) with `ranks` data-parallel ranks. Raises `ConfigError` with the numbers that
    would do."""
    batch, known = solve(section)
    if ranks not in known:
        near = sorted(sorted(known, key=lambda n: abs(n - ranks))[:6])
        raise ConfigError(
            f"`elasticity` trains with a batch of {batch} samples, which {ranks} data-parallel ranks cannot share in micro-batches of "
            f"{', '.join(map(str, section.micro_batch_sizes))}; {', '.join(map(str, near))} ranks could"
        )
    fitting = [micro for micro in section.micro_batch_sizes if batch % (micro * ranks) == 0]
    micro = max(fitting) if section.prefer_larger_batch else min(fitting)
    return batch, micro, batch // (micro * ranks)
