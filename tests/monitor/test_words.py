"""How numbers are shown, and where the ticks of an axis lie."""

from __future__ import annotations

import pytest

from zeroengine.monitor.plots import MOST_POINTS, byte_ticks, thinned, ticks
from zeroengine.monitor.words import aligned, in_bytes, in_counts, in_seconds


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (in_bytes(0), "0 B"), (in_bytes(1023), "1023 B"), (in_bytes(1536), "1.5 KiB"), (in_bytes(3 * 2**30), "3 GiB"),
        (in_counts(999), "999"), (in_counts(1500), "1.5 K"), (in_counts(6.6e9), "6.6 G"),
        (in_seconds(0), "0 s"), (in_seconds(2.5), "2.5 s"), (in_seconds(0.0015), "1.5 ms"), (in_seconds(2e-6), "2 µs"),
        (in_seconds(-0.004), "-4 ms"),
    ],
)  # fmt: skip
def test_numbers(shown: str, text: str) -> None:
    assert shown == text


def test_columns_of_numbers_are_to_the_right() -> None:
    lines = aligned([["name", "bytes"], ["a", "10 B"], ["long name", "-"]]).splitlines()
    assert lines[0] == "name       bytes" and lines[2] == "a           10 B" and lines[3].endswith("    -")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.0123), (2.1, 2.4), (1, 100), (5.0, 5.0), (-3.0, 7.0)])
def test_ticks_enclose_what_is_drawn(low: float, high: float) -> None:
    made = ticks(low, high)
    assert made[0] <= low and made[-1] >= high and 2 <= len(made) <= 9
    steps = {round((b - a) / (made[1] - made[0]), 6) for a, b in zip(made, made[1:], strict=False)}
    assert steps == {1.0}


def test_ticks_of_bytes_are_powers_of_two_apart() -> None:
    assert byte_ticks(0, 5 * 2**20) == [0.0, 2.0**20, 2.0**21, 3 * 2.0**20, 2.0**22, 5 * 2.0**20]
    assert byte_ticks(0, 0) == [0.0, 0.25]
    assert byte_ticks(5 * 2**20, 6 * 2**20, 4) == [(20 + i) * 2.0**18 for i in range(5)]


def test_a_line_of_many_points_keeps_its_ends() -> None:
    kept = thinned(range(10_000))
    assert len(kept) == MOST_POINTS and kept[0] == 0 and kept[-1] == 9999
    assert thinned([1, 2]) == [1, 2]
