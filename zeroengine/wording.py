"""Words of messages: lists that are cut off, the line of an error that tells."""

from __future__ import annotations

from collections.abc import Sequence


def listed(items: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """`items` as text, cut off with a count when there are more than `most`."""
    shown = separator.join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's message, `most` characters at most; its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__
