"""The job of a process in `benchmarks.overhead`: rank 0 of a world that exists only in torch's fake process group."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_LEARNING_RATE = 1e-3


class SmallLayers(nn.Module):
    """So many layers, each so small, that a step is made of host work: dispatch, hooks, bookkeeping."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Mean square (scalar) of the output for x [B, width]."""
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class SimulatedJob:
    """Trains with zeroengine at `stage` in a fake world, or with a plain torch loop when `stage` is None.

    The fake backend moves nothing, so values that other ranks would send are whatever memory held; only times count.
    """

    def __init__(self, stage: int | None, world: int, layers: int, width: int):
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # arithmetic on what other ranks "sent" must not be slower for its values
        torch.manual_seed(0)
        self.data = torch.randn(2, width)
        self._prime(width)
        model = SmallLayers(layers, width)
        self.parameters = sum(p.numel() for p in model.parameters())
        begin = time.perf_counter()
        if stage is None:
            self.step = self._plain(model)
        else:
            self.step = self._engine(model, stage, world)
        self.startup_seconds = time.perf_counter() - begin

    def ready(self) -> dict[str, Any]:
        return {
            "startup_seconds": self.startup_seconds,
            "parameters": self.parameters,
            "torch": torch.__version__,
        }

    def turn(self, steps: int) -> dict[str, Any]:
        seconds, finite = [], True
        for _ in range(steps):
            begin = time.perf_counter()
            loss = self.step()
            seconds.append(time.perf_counter() - begin)
            finite = finite and bool(loss.detach().isfinite())
        return {"seconds": seconds, "finite": finite}

    @staticmethod
    def _prime(width: int) -> None:
        """Imports and torch's lazily made tables, the same in every world, stay out of the start-up time."""
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)

        import zeroengine

        _ = zeroengine.initialize  # names resolve on first use
        layer = SmallLayers(1, width)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        torch.autograd.backward(layer(torch.randn(2, width)))
        optimizer.step()

    def _plain(self, model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(self.data)
            torch.autograd.backward(loss)
            optimizer.step()
            return loss

        return step

    def _engine(self, model: nn.Module, stage: int, world: int) -> Any:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        import zeroengine

        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        config = {
            "train_micro_batch_size_per_gpu": len(self.data),
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = zeroengine.initialize(model=model, config=config)

        def step() -> Tensor:
            loss: Tensor = engine(self.data)
            engine.backward(loss)
            engine.step()
            return loss

        return step
