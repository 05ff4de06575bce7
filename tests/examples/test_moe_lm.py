"""The example with experts: it learns, its loads even out, and it refuses what cannot be."""

from __future__ import annotations

import re

from tests.examples.launch import run_example, start_example

TINY = ("--layers", 1, "--width", 32, "--length", 16, "--batch", 8, "--k", 1, "--bytes", 20000, "--experts", 8)


def test_it_learns_and_shows_the_loads() -> None:
    out = run_example("moe_lm.py", *TINY, "--steps", 60, "--copies")
    first, last = (float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", out)[::1][:2])
    assert last < first < 6.0, out
    found = re.search(r"busiest expert ([\d.]+) before, ([\d.]+) after; busiest rank ([\d.]+) before, ([\d.]+) after", out)
    assert found, out
    before, after, rank_before, rank_after = map(float, found.groups())
    assert after < before and rank_before <= 1.02 and rank_after <= 1.02, out


def test_wrong_numbers_are_one_line() -> None:
    for ended in start_example("moe_lm.py", *TINY[:-2], "--experts", 3):
        assert ended.code != 0 and "--experts 3" in ended.err
    assert "--width 33" in start_example("moe_lm.py", "--width", 33, ranks=1, fresh=True)[0].err
