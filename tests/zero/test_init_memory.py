"""What a rank occupies while a model is built under `zero.Init`. `ZE_INIT_PARAMETERS=1500000000 pytest -s` builds a larger one, and
says what it found."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from tests.ranks import run_ranks
from zeroengine.zero import Init

_MIB = 2**20
_SLACK = 8 * _MIB  # the C heap, and code that is paged in


_WANTED = int(os.environ.get("ZE_INIT_PARAMETERS", "21000000"))
_WIDTH = 512 if _WANTED < 10**8 else 2048
_LARGEST = 4096 * _WIDTH  # parameters of the embedding


class _Model(nn.Module):
    """Of 4 bytes a parameter about 80 MiB; the largest module has 8."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, _WIDTH)
        layers = [nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)) for _ in range(blocks)]
        self.blocks = nn.ModuleList(layers)
        self.apply(self._again)

    @staticmethod
    def _again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def _peak(rank: int, world: int) -> tuple[int, int, int, int]:
    init = Init()
    with init:
        _Model(1)  # threads, groups and kernels are there now
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts again from the present
    before = _status("VmRSS")
    with init:
        model = _Model(round((_WANTED - _LARGEST) / (4 * _WIDTH**2)))
    peak, now = _status("VmHWM") - before, _status("VmRSS") - before
    whole = sum(p.numel() for p in model.parameters()) * torch.float32.itemsize
    return peak, now, whole, _LARGEST * torch.float32.itemsize


def test_a_rank_holds_its_share_and_at_most_one_module_more() -> None:
    for peak, now, whole, largest in run_ranks(_peak, 2, timeout=150 + _WANTED / 10**7):
        share = whole // 2
        assert whole > share + largest + _SLACK  # an ordinary construction would not pass
        sizes = {"peak": peak, "now": now, "share": share, "largest": largest}
        told = f"{whole // 4:,} parameters on 2 ranks, MiB: " + ", ".join(f"{name} {size / _MIB:.1f}" for name, size in sizes.items())
        sys.stdout.write(f"{told}\n")
        assert peak <= share + largest + _SLACK, told
        assert now <= share + _SLACK, told
