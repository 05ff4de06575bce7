"""What the ranks must have alike beside the model: options of parameter groups, and the configuration.

A learning rate that one rank alone has lowered (a schedule that follows its own loss) is a fault that no gradient shows:
replicas drift apart, or parts of one tensor train at different rates.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zeroengine.comm.protocol import Communicator

_POSITIVE = 0x7FFFFFFF  # fits int32 with either sign


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


def digest(lines: list[str]) -> int:
    """A non-negative number of 31 bits that tells lists of lines apart."""
    return zlib.crc32("\n".join(lines).encode()) & _POSITIVE


def first_difference(lines: list[str], control: Communicator) -> str:
    """Which line is not the same on all ranks. Collective; for lists that are known to differ."""
    me = control.ranks[control.rank]
    counts = control.exchange(torch.tensor([len(lines)]), "number of options").flatten().tolist()
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {r}: {int(n)}" for r, n in zip(control.ranks, counts, strict=True))
        return f"rank {me}: another number of options on each rank ({told})"
    table = control.exchange(torch.tensor([digest([line]) for line in lines]), "options")
    differs = (table != table[0]).any(0).nonzero()
    at = int(differs[0]) if len(differs) else 0
    odd = [control.ranks[r] for r in range(control.size) if table[r, at] != table[0, at]]
    return f"rank {me}: not the same on all ranks: here {lines[at]}, and ranks {odd} differ from rank {control.ranks[0]}"


def _number(value: Any) -> str | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return repr(value.item())
    if isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, (int, float)) for v in value):
        return repr(tuple(value))
    return None
