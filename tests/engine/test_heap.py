"""Host memory that a step frees is there for the next one, and no more than that is kept."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.ops.toolbox import NEEDS_COMPILER, REAL
from tests.ranks import run_ranks
from zeroengine.ops.build import library
from zeroengine.ops.heap import Heap
from zeroengine.zero import host

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20
GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep to their own rules")
CHOSEN = {"MALLOC_TOP_PAD_": str(1 << 17)}  # glibc's default, but somebody has chosen


def build(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def engine_of(model: nn.Module, stage: int = 0) -> Any:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    if stage:
        config["zero_optimization"] = {"stage": stage, "bucket_size": 1 << 18}
    return zeroengine.initialize(model=model, config=config)[0]


def step(engine: Any, x: torch.Tensor) -> float:
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def _faults(rank: int, world: int) -> tuple[int, bool]:
    engine = engine_of(build(512, 8))
    x = torch.randn(2048, 512)  # 4 MiB, as every activation
    for i in range(24):
        if i == 12:  # the first ones find places for all sizes
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step(engine, x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, host._heap is not None


@NEEDS_COMPILER
def test_a_step_takes_no_memory_from_the_system_again() -> None:
    """One activation is 1,024 pages; every step would take ten without."""
    faults, has_heap = run_ranks(_faults, 1, timeout=60)[0]
    assert faults < 1024 and has_heap


@GLIBC
def test_without_a_compiler_malloc_keeps_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every step would take two on average, and does take some: a block does not always fit where one of its size was."""
    env = {"CXX": str(tmp_path / "missing"), "ZE_CACHE_DIR": str(tmp_path)}
    faults, has_heap = run_ranks(_faults, 1, timeout=60, env=env, fresh=True)[0]
    assert faults < 6 * 1024 and not has_heap
    assert capfd.readouterr().err.count("no native library 'heap'") == 1


def test_thresholds_of_the_environment_are_left_alone() -> None:
    env = {"MALLOC_TRIM_THRESHOLD_": str(1 << 20), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    faults, has_heap = run_ranks(_faults, 1, timeout=60, env=env, fresh=True)[0]
    assert faults > 10 * 1024 and not has_heap


@NEEDS_COMPILER
def test_a_preloaded_malloc_is_left_alone(tmp_path: Path) -> None:
    source, made = tmp_path / "malloc.cpp", tmp_path / "libother.so"
    source.write_text(
        "#include <stdlib.h>\n"
        'extern "C" int posix_memalign(void** p, size_t align, size_t n) {\n'
        "    *p = aligned_alloc(align, (n + align - 1) / align * align);\n"
        "    return *p ? 0 : 12;\n"
        "}\n"
    )
    subprocess.run([REAL, "-shared", "-fPIC", str(source), "-o", str(made)], check=True, timeout=60)
    code = "import torch; from zeroengine.zero import host; host.keep_freed_memory(torch.device('cpu')); print(host._heap is None)"
    for preload, alone in ("", "False"), (str(made), "True"):
        env = {**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == alone, done.stderr


def _bounded(rank: int, world: int) -> bool:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 37, resource.RLIM_INFINITY))
    host.keep_freed_memory(torch.device("cpu"))
    return host._heap is not None


def test_no_range_is_reserved_of_a_bounded_address_space() -> None:
    assert run_ranks(_bounded, 1) == [False]


def _other(rank: int, world: int, folder: str) -> None:
    """A copy of the library is another allocator."""
    path = library("heap").path
    assert path is not None
    other = Heap(ctypes.CDLL(shutil.copy(path, f"{folder}/other.so")))
    assert other.install()
    host.keep_freed_memory(torch.device("cpu"))
    live, held = other.held().live, torch.ones(MIB)
    assert host._heap is None and other.held().live == live + held.nbytes


@NEEDS_COMPILER
def test_another_allocator_of_torch_is_left_alone(tmp_path: Path) -> None:
    run_ranks(_other, 1, str(tmp_path))


def _losses(rank: int, world: int, stage: int) -> tuple[list[float], list[int], bool]:
    engine = engine_of(build(256, 6), stage)
    losses, held = [], []
    for i in range(40):
        torch.manual_seed(100 * i + rank)
        losses.append(step(engine, torch.randn(256 + 8 * (i % 5), 256)))  # of several sizes
        held.append(resident())
    return losses, held, host._heap is not None


@NEEDS_COMPILER
@pytest.mark.parametrize("stage", [2, 3])
def test_the_memory_of_a_step_does_not_grow_and_changes_no_bit(stage: int) -> None:
    with_it, without = run_ranks(_losses, 2, stage), run_ranks(_losses, 2, stage, env=CHOSEN)
    for (losses, held, has_heap), (same, _, has_none) in zip(with_it, without, strict=True):
        assert has_heap and not has_none
        assert losses == same
        assert max(held[10:]) - held[10] < MIB // 2  # an activation is a quarter of a MiB, and there are six in a step


def _after_evaluation(rank: int, world: int) -> tuple[int, int, int]:
    engine = engine_of(build(256, 6), 2)
    x = torch.randn(64, 256)
    for _ in range(20):
        step(engine, x)
    before = resident()
    with torch.no_grad():
        engine(torch.randn(150_000, 256))  # 146 MiB an activation
    kept = resident()
    for _ in range(34):
        step(engine, x)
    return before, kept, resident()


@NEEDS_COMPILER
def test_what_an_evaluation_took_is_given_back() -> None:
    for before, kept, after in run_ranks(_after_evaluation, 2):
        assert kept - before > 250 * MIB
        assert after - before < 8 * MIB


def _trimmed(rank: int, world: int) -> None:
    host.keep_freed_memory(torch.device("cpu"))
    assert host._heap is not None
    held = torch.ones(MIB)
    torch.ones(16 * MIB)
    before = resident()
    host.HeapTrimmer().trim()
    assert resident() < before - 60 * MIB and bool((held == 1).all())


@NEEDS_COMPILER
def test_the_trimmer_trims_large_tensors_memory() -> None:
    run_ranks(_trimmed, 1)
