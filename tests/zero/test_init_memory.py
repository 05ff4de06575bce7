"""What a rank occupies while a model is built under `zero.Init`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.ranks import run_ranks
from zeroengine.zero import Init

_MIB = 2**20
_SLACK = 8 * _MIB  # the C heap, and code that is paged in


class _Model(nn.Module):
    """About 80 MiB; the largest module has 8."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 512)
        layers = [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 1024), nn.Linear(1024, 512)) for _ in range(blocks)]
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
        model = _Model(18)
    peak, now = _status("VmHWM") - before, _status("VmRSS") - before
    whole = sum(p.numel() for p in model.parameters()) * torch.float32.itemsize
    largest = 4096 * 512 * torch.float32.itemsize
    return peak, now, whole, largest


def test_a_rank_holds_its_share_and_at_most_one_module_more() -> None:
    for peak, now, whole, largest in run_ranks(_peak, 2, timeout=150):
        share = whole // 2
        assert whole > share + largest + _SLACK  # an ordinary construction would not pass
        told = f"peak {peak / _MIB:.1f}, now {now / _MIB:.1f}, share {share / _MIB:.1f}, largest {largest / _MIB:.1f} MiB"
        assert peak <= share + largest + _SLACK, told
        assert now <= share + _SLACK, told
