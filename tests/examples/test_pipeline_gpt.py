"""The pipeline example: it learns on 2 stages x 2 data-parallel ranks, and shows what it measured beside what was computed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.examples.launch import run_example, start_example

TINY = ("--layers", 2, "--width", 64, "--length", 16, "--bytes", 20000, "--micro-batches", 4)


def test_it_learns_and_draws_both_timelines(tmp_path: Path) -> None:
    out = run_example("pipeline_gpt.py", *TINY, "--steps", 30, "--output", tmp_path, ranks=4)
    before, after = (float(x) for x in re.findall(r"Held-out loss \w+: ([\d.]+)", out))
    assert after < before - 0.5, out
    idle = [float(x) for x in re.findall(r"(?:measured|simulated): [\d.]+ ms, idle ([\d.]+)%", out)]
    assert len(idle) == 2 and 0 < idle[1] <= idle[0] < 100, out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    computed = [e for e in events if e.get("ph") == "X"]
    assert len(computed) == 2 * 2 * 2 * 4  # panels, ranks of the pipeline, forward and backward, micro-batches


def test_wrong_numbers_are_one_line() -> None:
    ended = start_example("pipeline_gpt.py", "--width", 33, ranks=1, fresh=True)[0]
    assert ended.code != 0 and "--width" in ended.err.splitlines()[-1]
