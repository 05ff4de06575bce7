"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", " K", " M", " G", " T", " P", " E")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def in_bytes(value: float) -> str:
    """1536 as "1.5 KiB"."""
    return _scaled(value, 1024.0, _BYTES, " ")


def in_counts(value: float) -> str:
    """1500 as "1.5 K"."""
    return _scaled(value, 1000.0, _COUNTS, "")


def in_seconds(value: float) -> str:
    """0.0015 as "1.5 ms"."""
    for unit, name in _SECONDS:
        if abs(value) >= unit:
            return f"{value / unit:.4g} {name}"
    return "0 s" if not value else f"{value / 1e-6:.4g} µs"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first is the head; columns of numbers to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    right = [all(row[i][:1].isdigit() or row[i][:1] in ("-", "") for row in table[1:]) for i in range(len(widths))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()

    head, *rows = (line(row) for row in table)
    return "\n".join([head, "-" * (sum(widths) + 2 * (len(widths) - 1)), *rows])


def _scaled(value: float, base: float, units: Sequence[str], gap: str) -> str:
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{value:.4g}{gap}{unit}" if gap or unit else f"{value:.4g}"
        value /= base
    return f"{value:.4g}{gap}{units[-1]}"
