"""What the ranks must have alike beside the model: options of parameter groups, and the configuration.

A learning rate that one rank alone has lowered (a schedule that follows its own loss) is a fault that no gradient shows:
replicas drift apart, or parts of one tensor train at different rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from zeroengine.comm.alike import digest_of_lines

_MARK_BITS = 31  # of a digest that travels among a step's marks, which are int32 of either sign

Numbers = list[tuple[int, str, Any]]
"""(parameter group, name, number or tuple of numbers)."""


class OptionsDigest:
    """A number that tells options of parameter groups apart. Made anew where an option has changed: few do in a step, most in none."""

    def __init__(self) -> None:
        self._known: Numbers = []
        self._value = digest_of_lines([], _MARK_BITS)

    def of(self, groups: Iterable[Mapping[str, Any]]) -> int:
        """That of the options as they are now."""
        numbers = _numbers(groups)
        if numbers != self._known:
            self._known, self._value = numbers, digest_of_lines(_lines(numbers), _MARK_BITS)
        return self._value


def option_lines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each number among the options of each group, as they are now."""
    return _lines(_numbers(groups))


def _lines(numbers: Numbers) -> list[str]:
    return [f"{name} of parameter group {group} = {number!r}" for group, name, number in numbers]


def _numbers(groups: Iterable[Mapping[str, Any]]) -> Numbers:
    found = ((i, name, _number(value)) for i, group in enumerate(groups) for name, value in group.items())
    return [(i, name, number) for i, name, number in found if number is not None]


def leaf_lines(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each key of a nested configuration; places (paths, folders) may be others on each host."""
    lines = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            lines += leaf_lines(value, f"{path}.")
        elif not any(word in name for word in ("path", "dir", "folder")):
            lines.append(f"{path} = {value!r}")
    return lines


def _number(value: Any) -> Any:
    """`value` if it is a number, or several; else None."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, (int, float)) for v in value):
        return tuple(value)
    return None
