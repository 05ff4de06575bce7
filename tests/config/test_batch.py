"""Batch sizes from any two of three keys, checked against the true number of ranks only."""

from __future__ import annotations

import itertools

import pytest

from zeroengine.config import BatchSizes, Config, resolve_batch
from zeroengine.errors import ConfigError


def _config(train: int | None, micro: int | None, steps: int | None) -> Config:
    return Config(train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps)


@pytest.mark.parametrize(
    ("train", "micro", "steps", "ranks", "expected"),
    [
        (32, 4, 2, 4, (32, 4, 2)),
        (32, 4, None, 4, (32, 4, 2)),
        (32, None, 2, 4, (32, 4, 2)),
        (None, 4, 2, 4, (32, 4, 2)),
        (32, None, None, 4, (32, 8, 1)),
        (None, 4, None, 4, (16, 4, 1)),
    ],
)
def test_the_third_follows(train, micro, steps, ranks: int, expected: tuple[int, int, int]) -> None:
    assert resolve_batch(_config(train, micro, steps), ranks) == BatchSizes(*expected)


def test_whatever_is_left_out_comes_back() -> None:
    for micro, steps, ranks in itertools.product((1, 3), (1, 2, 5), (1, 2, 3)):
        sizes = BatchSizes(micro * steps * ranks, micro, steps)
        for left_out in range(3):
            given = [sizes.train, sizes.micro, sizes.accumulation]
            given[left_out] = None  # type: ignore[call-overload]
            assert resolve_batch(_config(*given), ranks) == sizes


@pytest.mark.parametrize(
    ("train", "micro", "steps", "ranks", "parts"),
    [
        (16, 1, 8, 1, ("train_batch_size 16", "1 × gradient_accumulation_steps 8 × 1 data-parallel rank = 8")),
        (30, 4, None, 2, ("30 / (train_micro_batch_size_per_gpu 4 × 2 data-parallel ranks) = 3.75", "24 or 32")),
        (2, None, None, 4, ("= 0.5", "; 4 would do")),
        (10, None, 3, 2, ("10 / (gradient_accumulation_steps 3 × 2", "6 or 12")),
        (None, None, 4, 2, ("neither train_batch_size nor", "gradient_accumulation_steps 4 alone")),
        (None, None, None, 2, ("neither train_batch_size nor",)),
        (4, 4, 1, 0, ("at least 1, not 0",)),
    ],
)
def test_the_arithmetic_is_in_the_message(train, micro, steps, ranks: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch(_config(train, micro, steps), ranks)
    for part in parts:
        assert part in str(caught.value)


def test_reading_does_not_depend_on_the_number_of_ranks() -> None:
    written = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    config = Config.load(written)  # right on 2 ranks, and read where nobody knows them yet
    assert resolve_batch(config, 2) == BatchSizes(16, 1, 8)
    assert Config.load(written, world_size=2) == config
    with pytest.raises(ConfigError, match="= 8"):
        Config.load(written, world_size=1)


def test_data_parallel_size() -> None:
    assert Config.load({"mesh": {"tp": 2, "pp": 2, "cp": 2}}).data_parallel_size(16) == 2
    assert Config.load({"mesh": {"dp_replicate": 2, "dp_shard": 4}}).data_parallel_size(8) == 8
    with pytest.raises(ConfigError, match="6 ranks cannot be divided by .*mesh.tp 4 = 4"):
        Config.load({"mesh": {"tp": 4}}).data_parallel_size(6)
    with pytest.raises(ConfigError, match="8 data-parallel ranks, which do not fit mesh.dp_replicate 3"):
        Config.load({"mesh": {"dp_replicate": 3}}).data_parallel_size(8)
    with pytest.raises(ConfigError, match="dp_shard 2"):
        Config.load({"mesh": {"dp_replicate": 2, "dp_shard": 2}}).data_parallel_size(8)


def test_to_dict_with_the_sizes() -> None:
    config = Config.load({"train_micro_batch_size_per_gpu": 2, "train_batch_size": "auto"})
    assert config.to_dict() == {"train_micro_batch_size_per_gpu": 2}
    assert config.to_dict(resolve_batch(config, 3)) == {
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 6, "gradient_accumulation_steps": 1,
    }  # fmt: skip


def test_auto_sizes_that_follow_from_nothing() -> None:
    config = Config.load({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"})
    with pytest.raises(ConfigError, match='"auto" \\(train_batch_size, train_micro_batch_size_per_gpu\\)'):
        resolve_batch(config, 2)
