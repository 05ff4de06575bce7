"""Host memory that a step frees is there for the next one."""

from __future__ import annotations

import platform
import resource

import pytest
import torch
from torch import nn

import zeroengine
from tests.ranks import run_ranks


def _faults(rank: int, world: int) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine, *_ = zeroengine.initialize(model=model, config=config)
    x = torch.randn(2048, 512)  # 4 MiB, as every activation
    for step in range(24):
        if step == 12:  # the first ones find places for all sizes
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(x).square().mean())
        engine.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep to their own rules")
def test_a_step_takes_no_memory_from_the_system_again() -> None:
    """One activation is 1,024 pages; every step would take two on average."""
    assert run_ranks(_faults, 1, timeout=60)[0] < 6 * 1024


def test_thresholds_of_the_environment_are_left_alone() -> None:
    env = {"MALLOC_TRIM_THRESHOLD_": str(1 << 20), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    assert run_ranks(_faults, 1, timeout=60, env=env, fresh=True)[0] > 10 * 1024
