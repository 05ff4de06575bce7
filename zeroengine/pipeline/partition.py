"""Which layers make up which stage."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroengine.errors import ModelError

_METHODS = "uniform, parameters, type:<regex> or a list of times"
PartitionMethod = str | Sequence[float]
"""uniform | parameters | type:<regex> | the measured time of each layer."""


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Borders [0, ..., len(weights)] of `parts` consecutive, non-empty parts: the heaviest is as light as can be, and of
    those the one with the least sum of squares. Raises `ModelError` with fewer layers than parts."""
    count = len(weights)
    if count < parts:
        raise ModelError(f"{count} layers can not be cut into {parts} stages; use fewer stages or more layers")
    totals = [0.0]
    for w in weights:
        totals.append(totals[-1] + float(w))

    def best(cost: Callable[[float], float], join: Callable[[float, float], float]) -> tuple[float, list[int]]:
        table = [0.0 if i == 0 else math.inf for i in range(count + 1)]
        choices: list[list[int]] = []
        for _ in range(parts):
            following, choice = [math.inf] * (count + 1), [0] * (count + 1)
            for end in range(1, count + 1):
                for start in range(end):
                    value = join(table[start], cost(totals[end] - totals[start]))
                    if value < following[end]:
                        following[end], choice[end] = value, start
            table = following
            choices.append(choice)
        borders = [count]
        for choice in reversed(choices):
            borders.append(choice[borders[-1]])
        return table[count], borders[::-1]

    heaviest, _ = best(lambda w: w, max)
    limit = heaviest * (1 + 1e-9)
    return best(lambda w: w * w if w <= limit else math.inf, lambda a, b: a + b)[1]


def layer_weights(method: PartitionMethod, names: Sequence[str], parameters: Callable[[], Sequence[int]]) -> list[float]:
    """A weight for each layer. `names` are the layers' class names; `parameters()` counts their elements."""
    if not isinstance(method, str):
        try:
            times = [float(t) for t in method]
        except TypeError as error:
            raise ModelError(f"partition_method {method!r} is not {_METHODS}") from error
        if len(times) != len(names):
            raise ModelError(f"partition_method has {len(times)} times for {len(names)} layers")
        if not all(0 <= t < math.inf for t in times):
            raise ModelError(f"partition_method has {times}; a time is a finite number, 0 or more")
        return times
    if method.lower() == "uniform":
        return [1.0] * len(names)
    if method.lower() == "parameters":
        return [float(n) for n in parameters()]
    if method.lower().startswith("type:"):
        try:
            pattern = re.compile(method[5:], re.IGNORECASE)
        except re.error as error:
            raise ModelError(f"partition_method '{method}': {error}") from error
        found = [1.0 if pattern.search(name) else 0.0 for name in names]
        if not any(found):
            raise ModelError(f"partition_method '{method}' matches none of the layers {sorted(set(names))}")
        return found
    raise ModelError(f"partition_method '{method}' is not {_METHODS}")


def measure_layers(layers: Sequence[Callable[[Any], Any]], sample: Any, repeats: int = 3) -> list[float]:
    """Seconds of each layer's forward on `sample`, the least of `repeats`: for `partition_method`."""
    times = []
    with torch.no_grad():
        for layer in layers:
            spent = []
            for _ in range(repeats):
                start = time.perf_counter()
                output = layer(sample)
                if torch.accelerator.is_available():
                    torch.accelerator.synchronize()
                spent.append(time.perf_counter() - start)
            times.append(min(spent))
            sample = output
    return times
