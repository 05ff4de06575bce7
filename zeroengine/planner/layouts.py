"""Ways to spread a job over its ranks, written as the engine's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroengine.config import Config, resolve_batch
from zeroengine.errors import ConfigError
from zeroengine.planner.hardware import Hardware
from zeroengine.planner.stage import Shape
from zeroengine.zero.policy import policy_for


@dataclass(frozen=True)
class Job:
    """What does not depend on the layout: `ranks` with `memory` bytes each, `batch` sequences of `sequence` tokens a step."""

    ranks: int
    memory: float
    sequence: int
    batch: int
    hardware: Hardware
    dtype: str = "bf16"
    optimizer: str = "AdamW"
    host_memory: float = float("inf")  # of one rank's share of its host
    base: dict[str, Any] = field(default_factory=dict)
    nvme_path: str = "/tmp/zeroengine"  # folder of state on a disk


@dataclass(frozen=True)
class Layout:
    """One way. `offload`: where masters and optimizer state live, `offload_values` where stage-3 shards do."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    stage: int = 0
    micro: int = 1
    recompute: bool = False
    offload: str = "none"
    offload_values: str = "none"
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    sequence_parallel: bool = False
    attention: str = "ulysses"

    @property
    def groups(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def cut(self) -> tuple[Any, ...]:
        """What layouts have in common that are of the same ranks on paper; it can be sorted."""
        return (
            self.pp, self.tp, self.cp, self.ep, self.recompute, self.schedule, self.virtual_stages or 0, self.sequence_parallel,
            self.attention,
        )  # fmt: skip

    def accumulation(self, job: Job) -> int:
        """Micro-batches a step. Raises `ConfigError` where the batch cannot be cut so."""
        return resolve_batch(self.settings(job), self.groups).accumulation

    def shape(self) -> Shape:
        return Shape(self.schedule, self.virtual_stages, self.recompute, self.pp)

    def config(self, job: Job) -> dict[str, Any]:
        """The engine's configuration."""
        zero: dict[str, Any] = {"stage": self.stage}
        for key, device in (("offload_optimizer", self.offload), ("offload_param", self.offload_values)):
            if device != "none":
                zero[key] = {"device": device, **({"nvme_path": job.nvme_path} if device == "nvme" else {})}
        degrees = {n: getattr(self, n) for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        made: dict[str, Any] = {
            "train_batch_size": job.batch,
            "train_micro_batch_size_per_gpu": self.micro,
            "zero_optimization": zero,
            "mesh": {name: size for name, size in degrees.items() if size > 1 or name == "dp_shard"} | self._pipeline(),
        }
        if "optimizer" not in job.base:
            made["optimizer"] = {"type": job.optimizer}
        if job.dtype != "fp32":
            made[job.dtype] = {"enabled": True}
        if self.tp > 1 and self.sequence_parallel:
            made["tensor_parallel"] = {"sequence_parallel": True}
        if self.cp > 1:
            made["sequence_parallel"] = {"attention": self.attention}
        return _merged(job.base, made)

    def _pipeline(self) -> dict[str, Any]:
        if self.pp == 1 or (self.schedule == "1f1b" and self.virtual_stages is None):
            return {}
        return {"pp_schedule": self.schedule} | ({} if self.virtual_stages is None else {"pp_virtual_stages": self.virtual_stages})

    def settings(self, job: Job) -> Config:
        return Config.load(self.config(job))

    def show(self) -> str:
        """In short: "pp 4 x dp 8 x tp 2, ZeRO-1, micro-batch 1"."""
        degrees = [f"{n} {getattr(self, n)}" for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(self, n) > 1]
        told = " x ".join(degrees) or "one rank"
        more = [f"ep {self.ep}"] if self.ep > 1 else []
        more += [f"ZeRO-{self.stage}", f"micro-batch {self.micro}"]
        more += [self.schedule] if self.pp > 1 else []
        more += [self.attention] if self.cp > 1 else []
        more += ["split sequences"] if self.sequence_parallel else []
        more += ["recompute"] if self.recompute else []
        more += [f"state on {self.offload}"] if self.offload != "none" else []
        more += [f"values on {self.offload_values}"] if self.offload_values != "none" else []
        return f"{told}; {', '.join(more)}"


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    made = dict(base)
    for key, value in over.items():
        mine = made.get(key)
        made[key] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return made


@dataclass(frozen=True)
class Choices:
    """What is tried. Degrees None: all divisors of the ranks (`tp`: inside a node)."""

    pp: Sequence[int] | None = None
    dp_replicate: Sequence[int] = (1,)
    cp: Sequence[int] = (1,)
    tp: Sequence[int] | None = None
    ep: Sequence[int] = (1,)
    stages: Sequence[int] = (0, 1, 2, 3)
    micro: Sequence[int] = (1, 2, 4, 8)
    recompute: Sequence[bool] = (False, True)
    offload: Sequence[str] = ("none", "cpu")
    schedules: Sequence[str] = ("1f1b",)
    sequence_parallel: Sequence[bool] = (False,)
    attention: Sequence[str] = ("ulysses",)

    def layouts(self, job: Job) -> Iterator[Layout]:
        """Every combination whose degrees multiply to the ranks and whose micro-batches to the batch. Whether the engine takes it
        is its own answer."""
        every = divisors(job.ranks)
        inside = [n for n in every if n <= job.hardware.per_node]
        for pp in every if self.pp is None else self.pp:
            for tp in inside if self.tp is None else self.tp:
                for cp in self.cp:
                    for replicas in self.dp_replicate:
                        if job.ranks % (pp * tp * cp * replicas) == 0:
                            yield from self._of_mesh(job, pp, tp, cp, replicas)

    def _of_mesh(self, job: Job, pp: int, tp: int, cp: int, replicas: int) -> Iterator[Layout]:
        shard = job.ranks // (pp * tp * cp * replicas)
        for ep in self.ep:
            for stage in self.stages:
                for micro in self.micro:
                    if job.batch % (micro * shard * replicas):
                        continue
                    for more in self._rest(job, pp, cp, tp, stage):
                        yield Layout(pp, replicas, shard, cp, tp, ep, stage, micro, **more)

    def _rest(self, job: Job, pp: int, cp: int, tp: int, stage: int) -> Iterator[dict[str, Any]]:
        for again in self.recompute:
            for offload in self.offload if stage else ("none",):
                for schedule in self.schedules if pp > 1 else ("1f1b",):
                    for splits in self.sequence_parallel if tp > 1 and cp == 1 else (False,):
                        for attention in self.attention if cp > 1 else ("ulysses",):
                            if offload == "cpu" and job.hardware.device == "cpu":
                                continue  # it is there already
                            yield {
                                "recompute": again, "offload": offload, "schedule": schedule, "sequence_parallel": splits,
                                "attention": attention,
                                "offload_values": offload if policy_for(stage).shard_params else "none",
                            }  # fmt: skip


def divisors(number: int) -> list[int]:
    """Ascending. Raises `ConfigError` below 1."""
    if number < 1:
        raise ConfigError(f"{number} ranks; there must be at least 1")
    return [n for n in range(1, number + 1) if number % n == 0]
