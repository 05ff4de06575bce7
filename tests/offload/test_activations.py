"""Activations that wait for backward on a disk."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.models import config
from tests.offload.runs import ADAMW
from tests.ranks import run_ranks
from zeroengine.offload.inputs import inputs_on_host, recomputed

WIDTH, LEAST = 24, 2000


class Deep(nn.Module):
    """Blocks, recomputed in backward if so wanted."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(6))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.recompute else block(x)
        return x.square().mean()


def _train(rank: int, world: int, folder: str) -> list[str]:
    import zeroengine

    faults = []
    for stage in (0, 2, 3):
        for recompute in (False, True):
            seen = []
            for moves in (False, True):
                torch.manual_seed(3)
                settings = config(stage, optimizer=ADAMW)
                engine = zeroengine.initialize(model=Deep(recompute), config=settings)[0]
                found: list[Any] = []
                ends = []
                for step in range(3):
                    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)
                    if moves:
                        with engine.offload_activations("nvme", folder, least_bytes=LEAST, buffer_count=2):
                            loss = engine(x)
                        (store,) = engine.mechanism.placement.stores
                        if len(store.records) < 5:
                            faults.append(f"stage {stage}, recompute {recompute}: {len(store.records)} records")
                    else:
                        loss = engine(x)
                    engine.backward(loss)
                    engine.step()
                    found += [loss.item(), x.grad.sum().item()]
                    del loss
                    if moves:
                        store.flush()
                        ends.append(store._end)
                        if store.records:
                            faults.append(f"stage {stage}: {len(store.records)} records are left")
                if len(set(ends)) > 1:
                    faults.append(f"stage {stage}: the file grows: {ends}")
                seen.append(found)
                engine.destroy()
            if seen[0] != seen[1]:
                faults.append(f"stage {stage}, recompute {recompute}: {seen}")
    return faults


def test_the_bits_are_those_of_activations_in_memory(tmp_path: Path) -> None:
    assert run_ranks(_train, 2, str(tmp_path), timeout=100) == [[], []]
    assert not list(tmp_path.iterdir())


def test_weights_stay_and_changes_in_place_are_seen(tmp_path: Path) -> None:
    from zeroengine.offload.activations import ActivationsOnDisk
    from zeroengine.offload.buffers import Buffers, disk_bytes
    from zeroengine.offload.folder import RankFolder
    from zeroengine.offload.store import DiskStore
    from zeroengine.ops.aio import file_io

    folder = RankFolder(tmp_path, 0)
    store = DiskStore(folder, "activations.bin", file_io(2, 4096), Buffers(2, disk_bytes))
    weight = nn.Parameter(torch.randn(40, 40))
    where = ActivationsOnDisk(store, [weight], 1000)
    x = torch.randn(40, 40, requires_grad=True)
    with where:
        y = x @ weight
        z = y.exp()
        small = (torch.ones(3, requires_grad=True) * 2).exp()
        assert len(store.records) == 2  # x and the result of exp; not the weight, not what is small
    kept = z.clone()
    z.sum().backward()
    assert torch.equal(z, kept) and x.grad is not None and torch.equal(x.grad, (kept @ weight.T).detach())
    small.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        small.sum().backward()
    store.close()
    folder.remove()


@pytest.mark.parametrize("pin", [False, True])
def test_a_host_without_page_locked_memory_keeps_copies_in_ordinary_memory(pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroengine.offload.activations import OnHost

    made = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("no page-locked memory")
        return made(*args, **more)

    monkeypatch.setattr(torch, "empty", empty)
    for tensor in (torch.arange(6.0).view(2, 3).t(), torch.tensor(True), torch.empty(0, 3, dtype=torch.bfloat16)):
        kept = OnHost(tensor, pin).unpack()
        assert torch.equal(kept, tensor) and kept.dtype is tensor.dtype


class _Segments(nn.Module):
    """Noisy segments whose inputs are remembered without being kept alive."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.4)) for _ in range(4))
        self.moves = moves
        self.inputs: list[weakref.ref[Tensor]] = []
        self.runs = 0

    def segment(self, pair: tuple[Tensor, int], block: nn.Module) -> tuple[Tensor, int]:
        self.runs += 1
        return block(pair[0]), pair[1] + 1

    def forward(self, x: Tensor) -> Tensor:
        pair = (x * 1.0, 0)
        with inputs_on_host(self.moves):
            for block in self.blocks:
                self.inputs.append(weakref.ref(pair[0]))
                pair = recomputed(self.segment, pair, block, moves=lambda t: True)
        return pair[0].square().mean()


def test_inputs_of_recomputed_segments_wait_elsewhere() -> None:
    """With a rule that moves tensors of the CPU as it would those of an accelerator: the bits stay, the inputs go."""
    found = []
    for moves in (False, True):
        model = _Segments(moves)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(9)
        loss = model(x)
        assert [ref() is None for ref in model.inputs] == [moves] * 4
        loss.backward()
        assert model.runs == 8 and x.grad is not None
        found.append([loss.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_on_the_cpu_it_says_that_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("zeroengine.offload.inputs.log_once", said.append)
    x = torch.ones(3, requires_grad=True)
    with inputs_on_host(True):
        recomputed(torch.exp, x).sum().backward()
    assert len(said) == 1 and "cpu_checkpointing: nothing is moved" in said[0]
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())
