"""Engines of every stage and number of ranks in one launch, with a state that is known to the bit."""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroengine
import zeroengine.engine.initialize  # now: ranks wait for each other from their first group on
from tests.engine.models import TinyLM, config, tokens
from zeroengine.engine import pieces as state
from zeroengine.zero.layout import Piece


class Awkward(TinyLM):
    """Tied head, a frozen layer with values of its own, a weight of shape (1, 17), a scalar, and buffers."""

    def __init__(self) -> None:
        super().__init__(width=17, blocks=2)
        self.row = nn.Parameter(torch.ones(1, 17))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(17, 3, bias=False).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())  # not contiguous
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + (self.row * self.scale).sum() * 0.01 + self.frozen(self.row).sum() * 0.01


def truth(key: str, shape: tuple[int, ...]) -> Tensor:
    """The right fp32 values of what is saved as `key`; a master and its weights have the same name in it."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.replace("master.", "model.").encode()))
    values = torch.rand(math.prod(shape), generator=generator) + 0.25
    return torch.tensor([7.0]) if key.endswith(".step") else values


def held(engine: Any) -> state.Pieces:
    """All that this rank holds."""
    optimizer = engine.mechanism.optimizer
    state.make_state(optimizer)
    return {
        **state.model_pieces(engine.module, engine.mechanism),
        **state.master_pieces(optimizer),
        **state.optimizer_pieces(optimizer),
    }


def right(key: str, piece: Piece) -> Tensor:
    values = truth(key, tuple(piece.shape))[piece.start : piece.start + piece.data.numel()]
    return (values * 100 if not piece.data.is_floating_point() else values).to(piece.data.dtype)


def fill(engine: Any, frozen_as: str = "fp32") -> None:
    """Writes the right values everywhere; a frozen weight in the precision `frozen_as`."""
    for key, parts in held(engine).items():
        for piece in parts:
            values = right(key, piece)
            piece.data.copy_(values.bfloat16() if key == "model.frozen.weight" and frozen_as == "bf16" else values)
    for b in (engine.module.seen, engine.module.turned):
        b.copy_(torch.arange(1, b.numel() + 1).view(b.shape))
    for view, _ in engine.optimizer.pieces():
        if "step" in engine.optimizer.state[view]:
            engine.optimizer.state[view]["step"].fill_(7.0)
    for bucket in engine.mechanism.buckets:
        bucket.publish()
        bucket.wait()


def scramble(engine: Any) -> None:
    """Writes wrong values everywhere."""
    for parts in held(engine).values():
        for piece in parts:
            piece.data.fill_(3)


def wrong(engine: Any) -> list[str]:
    """Keys of which this rank holds a wrong bit, and parameters that are wrong when gathered."""
    found = []
    for key, parts in held(engine).items():
        name = key.partition(".")[2]
        for piece in parts:
            expected = right(key, piece)
            if name in ("seen", "turned"):
                expected = torch.arange(1, piece.data.numel() + 1).to(piece.data.dtype)
            if not (_as_frozen(name, piece.data, expected) or torch.equal(piece.data, expected)):
                found.append(key)
    for view, piece in engine.optimizer.pieces():
        if float(engine.optimizer.state[view]["step"]) != 7.0:
            found.append(f"step of {piece.name}")
    whole = engine.full_state_dict()
    for name, value in (whole or {}).items():
        key = f"model.{ {'head.weight': 'emb.weight'}.get(name, name) }"
        expected = truth(key, tuple(value.shape)).view(value.shape).to(value.dtype)
        if name not in ("seen", "turned") and not (_as_frozen(name, value, expected) or torch.equal(value, expected)):
            found.append(f"gathered {name}")
    return found


def build(stage: int, dtype: str = "fp32", seed: int = 1, optimizer: Any = None, **changes: Any) -> Any:
    torch.manual_seed(seed)
    section = optimizer or {"type": "AdamW", "params": {"lr": 1e-2}}
    extra: dict[str, Any] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    model = Awkward()
    health = {"comm_timeout": 60.0}  # four ranks on two cores that others use too
    settings = config(stage, optimizer=section, health=health, **extra, **changes)
    engine, *_ = zeroengine.initialize(model=model, config=settings)
    return engine


def _as_frozen(name: str, value: Tensor, expected: Tensor) -> bool:
    """A frozen parameter has no master: what a bf16 run saves of it has the precision of bf16."""
    return name == "frozen.weight" and torch.equal(value, expected.bfloat16().to(value.dtype))


def train(engine: Any, first: int, count: int, rank: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = engine(*tokens(step, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextmanager
def world_of(n: int, rank: int, everyone: int, directory: Path, name: str) -> Iterator[bool]:
    """The first `n` of `everyone` ranks are a job of their own inside; the others wait at the end. Yields who takes part."""
    old = {key: os.environ[key] for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")}
    if rank < n:
        os.environ.update(WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
        dist.init_process_group("gloo", init_method=f"file://{directory}/{name}.store", rank=rank, world_size=n)
    try:
        yield rank < n
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.update(old)
    (directory / f"{name}.{rank}").touch()
    until = time.monotonic() + 240
    while any(not (directory / f"{name}.{r}").exists() for r in range(everyone)):
        if time.monotonic() > until:
            raise TimeoutError(f"rank {rank}: the others did not end {name}")
        time.sleep(0.01)
