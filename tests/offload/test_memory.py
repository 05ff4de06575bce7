"""Host memory with the optimizer's state on a disk, as the system counts it, and a limit that only this way stays under."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from zeroengine.errors import ConfigError

MIB = 1 << 20
LAYERS, WIDTH = 15, 2048  # 63 million parameters: 240 MiB of values, as much of gradients, twice that of state


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(field)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def settings(folder: str | None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 1, "bucket_size": WIDTH * (WIDTH + 1)}
    if folder is not None:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero, "steps_per_print": None}


def _limited(rank: int, world: int, folder: str, on_disk: bool) -> dict[str, Any]:
    import zeroengine

    zeroengine.initialize(model=nn.Linear(4, 4), config=settings(folder))[0].destroy()  # threads and libraries are there
    model = build()
    before = status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (before + 680 * MIB, resource.RLIM_INFINITY))
    try:
        engine = zeroengine.initialize(model=model, config=settings(folder if on_disk else None))[0]
    except ConfigError as error:
        return {"error": str(error)}
    held, losses = [], []
    base = status("VmRSS")
    for _ in range(3):
        loss = engine(torch.ones(1, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        held.append(status("VmRSS") - base)
    planned = engine.planned_memory()
    same = all(engine.memory_report()[kind] == size for kind, size in planned.items())
    return {"losses": losses, "held": held, "planned": planned, "same": same}


def test_a_limit_that_states_in_memory_do_not_fit_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")  # glibc gives large memory back, and keeps none for the next use
    told = run_ranks(_limited, 1, str(tmp_path), False, timeout=100, fresh=True)[0]
    assert "ulimit -v" in told["error"] and "MiB more (gradients 240 MiB, optimizer 480 MiB)" in told["error"]
    assert "device nvme" in told["error"]
    got = run_ranks(_limited, 1, str(tmp_path), True, timeout=100, fresh=True)[0]
    assert "error" not in got, got
    assert got["losses"][2] < got["losses"][0] and got["same"]
    planned = got["planned"]
    assert planned["optimizer"] == 0 and planned["disk"] > 470 * MIB
    expected = planned["gradients"] + planned["staging"]
    assert got["held"][2] <= 1.1 * expected, got
    assert got["held"][2] - got["held"][1] < 0.02 * expected, got


def test_a_limit_of_all_processes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroengine.offload import limits

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    rooms = [limits.Room(100, "a", True), limits.Room(30, "b", False)]
    assert limits.too_much(20, rooms) is None and limits.too_much(26, rooms) is rooms[0] and limits.too_much(31, rooms[1:]) is rooms[1]
