"""What the ranks must have alike beside the model: options of parameter groups, and the configuration.

A learning rate that one rank alone has lowered (a schedule that follows its own loss) is a fault that no gradient shows:
replicas drift apart, or parts of one tensor train at different rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from zeroengine.comm.alike import find_difference
from zeroengine.comm.protocol import Communicator

MARK_BITS = 31  # of a digest that travels among a step's marks, which are int32 of either sign


def option_lines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each number among the options of each group, as they are now."""
    lines = []
    for number, group in enumerate(groups):
        for name, value in group.items():
            shown = _number(value)
            if shown is not None:
                lines.append(f"{name} of parameter group {number} = {shown}")
    return lines


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


def first_difference(lines: list[str], control: Communicator) -> str:
    """Which line is not the same on all ranks. Collective; for lists that are known to differ."""
    found, me = find_difference(lines, control, "options"), control.ranks[control.rank]
    if found.counts is not None:
        return f"rank {me}: another number of options on each rank ({found.counts})"
    odd = list(found.odd)
    return f"rank {me}: not the same on all ranks: here {lines[found.at]}, and ranks {odd} differ from rank {control.ranks[0]}"


def _number(value: Any) -> str | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return repr(value.item())
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, (int, float)) for v in value):
        return repr(tuple(value))
    return None
