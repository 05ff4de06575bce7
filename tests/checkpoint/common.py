"""A small state of tensors of awkward shapes, cut over ranks as buckets cut it."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroengine.zero.layout import BucketLayout, Piece

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (1, 17),
    "b": (3, 5),
    "c": (7,),
    "scalar": (),
    "d": (2, 3, 4, 5),
    "ones": (1, 1, 1),
    "empty": (0, 3),
}
DTYPES = {"model": torch.bfloat16, "master": torch.float32, "optim": torch.int32, "half": torch.float16}


def full(key: str) -> Tensor:
    """The right value of the tensor saved as `key`, e.g. "model.a": another one for each key, NaN payloads included."""
    group, name = key.split(".")
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    bits = torch.iinfo(torch.int16 if DTYPES[group].itemsize == 2 else torch.int32)
    shape = SHAPES[name]
    raw = torch.randint(bits.min, bits.max, (math.prod(shape),), generator=generator, dtype=torch.int64)
    return raw.to(torch.int16 if bits.bits == 16 else torch.int32).view(DTYPES[group]).view(shape)


def keys() -> list[str]:
    return [f"{group}.{name}" for group in DTYPES for name in SHAPES]


def pieces(rank: int, world: int, *, filled: bool, whole: tuple[str, ...] = ("half",)) -> dict[str, list[Piece]]:
    """This rank's slices of one bucket a dtype; groups in `whole` are held whole by every rank."""
    found: dict[str, list[Piece]] = {}
    for group, dtype in DTYPES.items():
        layout = BucketLayout.build([(f"{group}.{n}", torch.Size(s)) for n, s in SHAPES.items()], world)
        flat = torch.zeros(layout.padded, dtype=dtype)
        if filled:
            for spec in layout.specs:
                flat[spec.offset : spec.end] = full(spec.name).reshape(-1)
        if group in whole:
            for spec in layout.specs:
                found[spec.name] = [Piece(spec.name, spec.shape, 0, flat[spec.offset : spec.end])]
            continue
        start, end = layout.slice_of(rank)
        shard = flat[start:end].clone()
        for spec in layout.specs:
            found[spec.name] = [Piece(spec.name, spec.shape, 0, shard[:0])] if spec.numel == 0 else []
        for segment in layout.segments(start, end):
            spec = layout.specs[segment.index]
            data = shard[segment.at : segment.at + segment.end - segment.start]
            found[spec.name].append(Piece(spec.name, spec.shape, segment.start, data))
    return found


def wrong_bits(held: dict[str, list[Piece]]) -> list[str]:
    """Keys of which a piece differs in any bit from `full`."""
    wrong = []
    for key, parts in held.items():
        right = full(key).reshape(-1)
        for piece in parts:
            expected = right[piece.start : piece.start + piece.data.numel()]
            if not torch.equal(piece.data.view(torch.uint8), expected.contiguous().view(torch.uint8)):
                wrong.append(key)
    return wrong


def own_values(rank: int) -> dict[str, Any]:
    return {
        "python": random.Random(rank).getstate(),
        "torch": torch.Generator().manual_seed(rank).get_state(),
        "rank": rank,
    }


REPLICATED: dict[str, Any] = {
    "global_steps": 3,
    "scaler": {"scale": 65536.0, "good": 7},
    "scheduler": {"last_lr": [1e-3, 2e-3], "warm": (1, 2)},
    "client_state": {"epoch": 1, "note": "ok", "best": float("inf"), "none": None},
}


def start(rank: int, world: int) -> None:
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)


def group(rank: int, world: int) -> dict[str, Any]:
    return {"process_group": dist.group.WORLD if world > 1 else None, "rank": rank, "world": world}


ALONE: dict[str, Any] = {"process_group": None, "rank": 0, "world": 1}


def tiny(value: float) -> dict[str, list[Piece]]:
    """Two tensors on one rank, every element `value`."""
    return {
        "model.w": [Piece("w", torch.Size((2, 3)), 0, torch.full((6,), float(value)))],
        "model.b": [Piece("b", torch.Size((3,)), 0, torch.full((3,), float(value)))],
    }


def value_of(held: dict[str, list[Piece]]) -> float | None:
    """The value that all elements have, or None if they differ."""
    values = {v for parts in held.values() for piece in parts for v in piece.data.tolist()}
    return values.pop() if len(values) == 1 else None
