"""Out of memory: what a rank held, what would help and by how much, and a snapshot for later."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroengine.errors import OutOfMemoryError, ZeroEngineError
from zeroengine.monitor.recorder import resident
from zeroengine.monitor.words import aligned, in_bytes, in_seconds
from zeroengine.zero.policy import policy_for

_CPU_ALLOCATOR = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")


_ELSEWHERE = ("disk", "host")  # kinds that are not on the device


class DeviceOutOfMemoryError(OutOfMemoryError, torch.OutOfMemoryError):
    """Of an accelerator; also caught as torch's own."""


@dataclass(frozen=True)
class Layout:
    """What the remedies follow from: the stage, ranks of the job, samples of a micro-batch, micro-batches of a step, where
    parameters and state live ("none": on the device), whether the device is an accelerator, bytes by kind that are planned, with what is
    gathered and on its way at its most as `working`, and the same for the stages above; other layouts that a plan of the job has."""

    stage: int
    ranks: int
    micro: int
    accumulation: int
    params_at: str
    state_at: str
    accelerator: bool
    planned: Mapping[str, int]
    at_stage: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    others: Sequence[Mapping[str, Any]] = ()
    several: int = 0  # bytes that a rank holds more where a step has several micro-batches and not one


@dataclass(frozen=True)
class Remedy:
    """A change of the configuration and the bytes that it saves on a rank; None where that depends on the model."""

    text: str
    saves: int | None


def is_exhaustion(error: BaseException) -> bool:
    """The allocator of the host or of an accelerator had nothing left."""
    if isinstance(error, ZeroEngineError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_ALLOCATOR)


def remedies(layout: Layout, held: Mapping[str, int], beyond: int) -> list[Remedy]:
    """What would help, the most first. `beyond`: bytes that the process held or asked for beyond the kinds: activations, mostly."""
    planned = layout.planned
    found = []
    for stage, there in layout.at_stage.items():
        saved = sum(planned.get(kind, 0) - size for kind, size in there.items() if kind not in _ELSEWHERE)
        if saved > 0:
            found.append(Remedy(f"zero_optimization.stage: {stage} (now {layout.stage})", saved))
    away = "cpu" if layout.accelerator else "nvme"
    path = "" if layout.accelerator else " with nvme_path"
    if layout.state_at == "none" and planned.get("optimizer"):
        found.append(Remedy(f"zero_optimization.offload_optimizer.device: {away}{path}", planned["optimizer"]))
    shards_values = policy_for(layout.stage).shard_params
    if shards_values and layout.params_at == "none" and planned.get("parameters"):
        found.append(Remedy(f"zero_optimization.offload_param.device: {away}{path}", planned["parameters"]))
    working = held.get("working", 0)
    if shards_values and working:
        found.append(Remedy("zero_optimization.stage3_max_live_parameters: a smaller number", working // 2))
    if layout.micro > 1:
        samples = layout.accumulation * layout.micro  # of a rank in a step: they stay as many
        fewer = max(n for n in range(1, layout.micro // 2 + 1) if samples % n == 0)
        change = f"train_micro_batch_size_per_gpu: {fewer} (now {layout.micro}) with gradient_accumulation_steps: {samples // fewer}"
        saved = max(beyond, 0) * (layout.micro - fewer) // layout.micro
        if not saved or saved > layout.several:
            found.append(Remedy(f"{change}, the same batch", saved - layout.several if saved else None))
    found.sort(key=lambda r: -(r.saves or 0))
    found += [
        Remedy(f"{o['layout']}, of zerorun plan: {in_bytes(o['memory'])} in all, {in_seconds(o['seconds'])} a step", None)
        for o in layout.others
    ]
    found.append(Remedy("activation checkpointing in the model (model.gradient_checkpointing_enable() for transformers)", None))
    return found


def explain(
    error: BaseException, phase: str, rank: int, device: torch.device, layout: Layout, held: Mapping[str, int], folder: Path | None,
    largest: Sequence[tuple[str, int]],
) -> OutOfMemoryError:  # fmt: skip
    """The error to raise in place of `error`. With a `folder` a snapshot is left there. `largest`: buckets and their bytes."""
    total = sum(size for kind, size in held.items() if kind not in _ELSEWHERE)
    now = resident(device)
    asked = _asked(str(error))
    found = remedies(layout, held, now + asked - total)
    rows = [
        [kind, in_bytes(layout.planned[kind]) if kind in layout.planned else "-", in_bytes(size)] for kind, size in held.items() if size
    ]
    left = None if folder is None else _snapshot(folder, error, phase, rank, device, layout, held, found, largest, now)
    where = "" if left is None else f"\nSnapshot: {left}"
    options = "\n".join(f"  {r.text}" + ("" if r.saves is None else f": saves {in_bytes(r.saves)}") for r in found)
    kind = DeviceOutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else OutOfMemoryError
    more = f"\n`zerorun plan` says which layouts of this job fit (zerorun plan --gpus {layout.ranks} --model ... --config ...)."
    return kind(
        f"rank {rank}: out of memory in {phase}: {str(error).strip() or type(error).__name__}\n"
        f"{aligned([['kind', 'planned', 'held'], *rows])}\nThe process holds {in_bytes(now)} in all. What would help, the most first:\n"
        f"{options}{more}{where}"
    )


def _asked(text: str) -> int:
    """Bytes that the CPU's allocator was asked for, where it says so."""
    _, _, after = text.partition("you tried to allocate ")
    number = after.split(" ", 1)[0]
    return min(int(number), 1 << 50) if number.isdigit() else 0


def _snapshot(
    folder: Path, error: BaseException, phase: str, rank: int, device: torch.device, layout: Layout, held: Mapping[str, int],
    found: Sequence[Remedy], largest: Sequence[tuple[str, int]], now: int,
) -> Path | None:  # fmt: skip
    """Writes `out-of-memory-<rank>.json`, and CUDA's own snapshot beside it. A folder that cannot be written hides nothing."""
    values: dict[str, Any] = {
        "rank": rank, "phase": phase, "error": f"{type(error).__name__}: {error}", "process": os.getpid(), "resident": now,
        "held": dict(held), "planned": dict(layout.planned), "stage": layout.stage, "micro_batch": layout.micro,
        "remedies": [{"change": r.text, "saves": r.saves} for r in found],
        "largest_buckets": [{"parameters": name, "bytes": size} for name, size in largest],
    }  # fmt: skip
    path = folder / f"out-of-memory-{rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"out-of-memory-{rank}.pickle"))
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError:
        return None
    return path
