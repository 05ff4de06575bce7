"""`elasticity`: one batch, many numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from zeroengine.config import BatchSizes, Config, resolve_batch
from zeroengine.config.elastic import ElasticitySection, _rich_numbers, solve
from zeroengine.errors import ConfigError


def config(**section: Any) -> Config:
    return Config.load({"elasticity": {"enabled": True, **section}})


def divisors(n: int) -> int:
    return sum(n % d == 0 for d in range(1, n + 1))


def test_rich_numbers_have_more_divisors_than_any_smaller_one() -> None:
    expected, most = [], 0
    for n in range(1, 3000):
        if divisors(n) > most:
            most = divisors(n)
            expected.append(n)
    assert list(_rich_numbers(2999)) == expected


@pytest.mark.parametrize(
    "section",
    [
        {"max_train_batch_size": 100, "micro_batch_sizes": [2, 4, 6], "max_gpus": 40},
        {"max_train_batch_size": 64, "micro_batch_sizes": [3], "min_gpus": 2, "max_gpus": 9},
        {"max_train_batch_size": 500, "micro_batch_sizes": [8, 12, 16, 17], "prefer_larger_batch": False},
    ],
)
def test_the_batch_is_the_same_on_all_numbers_of_ranks_and_no_other_number_would_do(section: dict[str, Any]) -> None:
    made = config(**section)
    batch, known = solve(made.elasticity)
    assert batch <= section["max_train_batch_size"] and made.world_sizes() == known
    low, high = section.get("min_gpus", 1), section.get("max_gpus", 10000)
    for ranks in range(1, batch + 2):
        fits = low <= ranks <= high and any(batch % (micro * ranks) == 0 for micro in section["micro_batch_sizes"])
        assert (ranks in known) == fits
        if fits:
            sizes = resolve_batch(made, ranks)
            assert sizes.train == batch == sizes.micro * sizes.accumulation * ranks and sizes.micro in section["micro_batch_sizes"]
        else:
            with pytest.raises(ConfigError, match=f"batch of {batch} samples, which {ranks} data-parallel ranks cannot share"):
                resolve_batch(made, ranks)


def test_no_other_choice_has_more_numbers_of_ranks() -> None:
    section = ElasticitySection(enabled=True, max_train_batch_size=100, micro_batch_sizes=(2, 4, 6), max_gpus=1000)
    batch, known = solve(section)

    def count(b: int) -> int:
        return sum(any(b % (m * n) == 0 for m in (2, 4, 6)) for n in range(1, b + 1))

    assert len(known) == max(count(b) for b in range(2, 101))
    assert batch == 96


def test_which_micro_batch() -> None:
    wide = {"max_train_batch_size": 16, "micro_batch_sizes": [1, 2, 4]}
    assert resolve_batch(config(**wide), 2) == BatchSizes(12, 2, 3)
    assert resolve_batch(config(**wide, prefer_larger_batch=False), 2) == BatchSizes(12, 1, 6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 8}, "`train_batch_size` is given beside `elasticity`"),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": []}}, "elasticity.micro_batch_sizes"),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": [0]}}, "integers of 1 or more"),
        ({"elasticity": {"enabled": True, "min_gpus": 5, "max_gpus": 2}}, "max_gpus 2 is less than min_gpus 5"),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 1}}, "no room for one micro-batch of 2"),
        ({"elasticity": {"enabled": True, "model_parallel_size": 2}}, "give the degrees in `mesh`"),
        ({"elasticity": {"enabled": True, "max_batch": 2}}, "max_batch"),
    ],
)
def test_what_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"elasticity": {"enabled": True}, **values})
    assert message in str(caught.value)


def test_batch_keys_beside_it_can_be_passed_over_and_off_is_off() -> None:
    both = Config.load({"train_batch_size": 7, "elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True}})
    assert resolve_batch(both, 1).train == solve(both.elasticity)[0]
    off = Config.load({"train_batch_size": 8, "elasticity": {"enabled": False}})
    assert resolve_batch(off, 2) == BatchSizes(8, 4, 1) and off.world_sizes() is None


def test_ranks_that_share_a_sample_count_once() -> None:
    made = Config.load({"mesh": {"tp": 2}, "elasticity": {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1]}})
    assert made.world_sizes() == (2, 4, 8)
    with pytest.raises(ConfigError, match="no number of ranks from min_gpus 50"):
        solve(config(max_train_batch_size=4, micro_batch_sizes=[1], min_gpus=50).elasticity)
