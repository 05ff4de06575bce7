"""Waits on a stream, times of phases and errors of the allocator on CUDA. Two processes; needs two devices, the last test one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.monitor.jobs import make
from tests.ranks import run_ranks
from zeroengine.errors import OutOfMemoryError


def _train(rank: int, world: int, folder: str) -> dict[str, Any]:
    engine = make(3, comms_logger={"enabled": True}, monitor={"run_dir": folder}, wall_clock_breakdown=True)
    for step in range(4):
        for micro in range(2):
            x = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(10 * step + micro)).to(engine.device)
            engine.backward(engine(x, x))
            engine.step()
    return {"report": json.loads(engine.report().json()), "summary": engine.log_summary()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_waits_and_times(tmp_path: Path) -> None:
    for got in run_ranks(_train, 2, str(tmp_path), timeout=180):
        time = got["report"]["time"]
        assert all(p["measured"] >= 0 for p in time["phases"]) and time["step"] > 0
        assert "all_gather" in got["summary"]


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_the_devices_allocator_has_nothing_left(tmp_path: Path) -> None:
    engine = make(0, monitor={"run_dir": str(tmp_path)})
    x = torch.zeros(2, 5, dtype=torch.int64, device=engine.device)
    engine.module.head.register_forward_pre_hook(lambda *_: torch.empty(1 << 45, device=engine.device))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine(x, x)
    assert isinstance(caught.value, OutOfMemoryError) and "train_micro_batch_size_per_gpu: 1 (now 2)" in str(caught.value)
    assert (tmp_path / "out-of-memory-0.json").exists() and (tmp_path / "out-of-memory-0.pickle").exists()
    engine.destroy()
