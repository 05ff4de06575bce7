"""`examples/long_context.py` on tiny settings: ranks that share sequences learn what one process learns."""

from __future__ import annotations

import re

import pytest

from tests.examples.launch import run_example, start_example

pytestmark = pytest.mark.ranks

TINY = ("--width", 32, "--layers", 1)


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", out)]


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_two_ranks_learn_what_one_learns(attention: str) -> None:
    options = (*TINY, "--tokens", 251, "--steps", 3, "--attention", attention)
    alone = run_example("long_context.py", *options, ranks=1, fresh=attention == "ring")
    shared = run_example("long_context.py", *options)
    assert len(losses(alone)) == 3
    assert losses(shared) == pytest.approx(losses(alone), abs=1.1e-4)  # four digits are printed
    assert "251 of 251 tokens" in alone and "126 of 251 tokens" in shared


def test_two_ranks_train_at_a_length_that_one_has_no_memory_for() -> None:
    options = (*TINY, "--tokens", 8192, "--steps", 1, "--memory-limit", 40)
    alone = start_example("long_context.py", *options, ranks=1)[0]
    assert alone.code == 1 and "8192 tokens on 1 rank(s) do not fit into 40 MiB; use more ranks" in alone.err
    assert "4096 of 8192 tokens" in run_example("long_context.py", *options)


def test_impossible_arguments_are_refused() -> None:
    for options, said in ((("--tokens", 0), "--tokens 0: must be at least 1"), (("--width", 40), "--width 40: must be a multiple")):
        ended = start_example("long_context.py", *options, ranks=1)[0]
        assert ended.code == 2 and said in ended.err
