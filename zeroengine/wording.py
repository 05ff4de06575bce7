"""Words: of messages (lists that are cut off, the name that was meant, the line of an error that tells), sizes as written."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([a-z]*)", re.IGNORECASE)
_PREFIXES = ("", "K", "M", "G", "T")
_UNITS = {
    **{f"{prefix}B": 1000**i for i, prefix in enumerate(_PREFIXES)},
    **{f"{prefix}IB": 1024**i for i, prefix in enumerate(_PREFIXES) if prefix},
    "": 1,
}


def listed(items: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """`items` as text, cut off with a count when there are more than `most`."""
    shown = separator.join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A question about the most similar of `known`, whatever its case; `otherwise` when none is similar."""
    by_folded = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_folded, n=1, cutoff=0.5)
    return f"did you mean `{by_folded[near[0]]}`?" if near else otherwise


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's message, `most` characters at most; its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def bytes_of(text: str) -> int | None:
    """Bytes of a size above 0 such as "80GB", "1.5 GiB" or "512"; None for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2].upper()]) or None


def size(nbytes: float) -> str:
    """In TB, GB, MB or kB of a thousand."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"
