"""Real architectures, layers and sequences shared by 2 and 4 ranks: five steps follow one process.

The ranks are started once for each number of them, and run one engine after another.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.parallel.hf_models import KINDS, Losses, error, reference, sequence, tensor, train
from tests.ranks import run_ranks

pytest.importorskip("transformers")

Runs = dict[str, tuple[str, dict[str, Any]]]

LAYERS: Runs = {
    f"{kind} {name} stage {stage}": (kind, tensor(2, stage, splits))
    for kind in KINDS for name, splits in (("tp2", False), ("tp2+sp", True)) for stage in (1, 3)
}  # fmt: skip
LAYERS |= {
    "mistral window": ("mistral", tensor(2, 2)),
    "mixtral experts": ("mixtral", tensor(2, 1)),
    "opt": ("opt", tensor(2, 3)),
    "one key head": ("mqa", tensor(2, 3)),
    "stage 0": ("llama", tensor(2, 0)),
    "loss of parts": ("llama", tensor(2, 1, loss=True)),
    "loss of parts, tied": ("gpt2", tensor(2, 3, loss=True)),
    "loss of parts, split sequence": ("llama", tensor(2, 3, True, loss=True)),
    "computed again": ("again", tensor(2, 3)),
    "computed again, split sequence": ("again", tensor(2, 1, True)),
    "llama64": ("llama64", tensor(2, 1, gradient_clipping=0)),
}
SEQUENCES: Runs = {
    f"{kind} {name} stage {stage}": (kind, sequence(name, 2, stage))
    for kind in KINDS for name in ("ulysses", "ring") for stage in (1, 3)
}  # fmt: skip
SEQUENCES |= {
    "packed ring": ("packed", sequence("ring", 2, 1)),
    "packed ulysses": ("packed", sequence("ulysses", 2, 0)),
    "bert contiguous": ("bert", sequence("ring", 2, 1, layout="contiguous")),
    "mistral window": ("mistral", sequence("ring", 2, 2)),
    "opt": ("opt", sequence("ring", 2, 1)),
    "stage 0": ("llama", sequence("ulysses", 2, 0)),
    "computed again": ("again", sequence("ring", 2, 3)),
    "sum": ("llama", sequence("ulysses", 2, 2, gradient_reduction="sum")),
}
FOUR: Runs = {f"{kind} ulysses2 x ring2 stage {stage}": (kind, sequence("usp", 4, stage, ulysses=2)) for kind in KINDS for stage in (1, 3)}
FOUR |= {
    "tp4, two key heads": ("llama", tensor(4, 1)),
    "tp4+sp": ("gpt2", tensor(4, 3, True)),
    "tp2 x ring2": ("llama", sequence("ring", 2, 1, mesh={"tp": 2})),
    "tp2 x ulysses2, loss of parts": ("llama", sequence("ulysses", 2, 3, mesh={"tp": 2}, tensor_parallel={"loss_parallel": True})),
}
DATA: Runs = {  # two groups of two ranks with different batches
    "ulysses2 x dp2": ("gpt2", sequence("ulysses", 2, 1)),
    "ring2 x dp2": ("llama", sequence("ring", 2, 3)),
    "ring2 x replicas": ("packed", sequence("ring", 2, 3, mesh={"dp_replicate": 2})),
    "tp2 x dp2": ("qwen", tensor(2, 3)),
    "tp2+sp x replicas": ("llama", tensor(2, 1, True, mesh={"dp_replicate": 2})),
}


@cache
def one_process(kind: str, groups: int = 1, clipping: float = 0.5, uneven: bool = True) -> Losses:
    return reference(kind, groups, clipping, uneven)


@pytest.fixture(scope="module")
def layers() -> list[dict[str, Losses]]:
    return run_ranks(train, 2, LAYERS, timeout=300)


@pytest.fixture(scope="module")
def sequences() -> list[dict[str, Losses]]:
    return run_ranks(train, 2, SEQUENCES, timeout=300)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Losses]]:
    return run_ranks(train, 4, FOUR | DATA, timeout=400)


@pytest.mark.parametrize("label", LAYERS)
def test_two_ranks_share_layers(layers: list[dict[str, Losses]], label: str) -> None:
    kind = LAYERS[label][0]
    for found in layers:
        if kind.endswith("64"):  # norms are told in fp32
            losses = found[label][0], one_process(kind, clipping=0)[0]
            assert max(abs(a - b) / b for a, b in zip(*losses, strict=True)) <= 1e-9
        else:
            assert error(found[label], one_process(kind)) <= 1e-5


@pytest.mark.parametrize("label", SEQUENCES)
def test_two_ranks_share_sequences(sequences: list[dict[str, Losses]], label: str) -> None:
    for found in sequences:
        assert error(found[label], one_process(SEQUENCES[label][0])) <= 1e-5


@pytest.mark.parametrize("label", FOUR)
def test_four_ranks(four: list[dict[str, Losses]], label: str) -> None:
    for found in four:
        assert error(found[label], one_process(FOUR[label][0])) <= 1e-5


@pytest.mark.parametrize("label", DATA)
def test_four_ranks_with_two_batches(four: list[dict[str, Losses]], label: str) -> None:
    kind, config = DATA[label]
    if "cp" in config["mesh"]:  # the loss of all valid tokens, the same number everywhere
        for found in four:
            assert error(found[label], one_process(kind, 2)) <= 1e-5
        return
    # the loss of its own batch on each rank
    mean = [sum(values) / 4 for values in zip(*(found[label][0] for found in four), strict=True)]
    assert error((mean, four[0][label][1]), one_process(kind, 2, uneven=False)) <= 1e-5
