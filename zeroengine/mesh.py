"""The ranks of a job as a mesh of named dimensions, and the communicators that live on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroengine.comm.fabric import AnyCommunicator, Fabric
from zeroengine.errors import ConfigError

DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost to innermost: neighbours in rank are neighbours in tp."""
DATA_DIMS = ("dp_replicate", "dp_shard", "cp")
"""Dimensions over which gradients are averaged."""
SHARD_DIMS = ("dp_shard", "cp")
"""Dimensions over which parameters, gradients and optimizer state are sharded."""


@dataclass(frozen=True)
class Degrees:
    """Sizes of the mesh's dimensions; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @staticmethod
    def resolve(world_size: int, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1) -> Degrees:
        """Fills in `dp_shard` = -1 with what is left of `world_size`; raises `ConfigError` for impossible degrees."""
        given = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        for name, size in given.items():
            if size < 1 and not (name == "dp_shard" and size == -1):
                allowed = "-1 (what is left) or at least 1" if name == "dp_shard" else "at least 1"
                raise ConfigError(f"mesh.{name} = {size}: must be {allowed}")
        others = math.prod(size for name, size in given.items() if name != "dp_shard")
        arithmetic = " x ".join(f"{name} {size}" for name, size in given.items() if size not in (1, -1)) or "1"
        if dp_shard == -1:
            if world_size % others:
                raise ConfigError(
                    f"mesh: {arithmetic} = {others} does not divide {world_size} ranks "
                    f"({world_size} / {others} = {world_size / others:.2f} for dp_shard); "
                    "change a degree or the number of ranks"
                )
            given["dp_shard"] = world_size // others
        elif others * dp_shard != world_size:
            raise ConfigError(
                f"mesh: {arithmetic} = {others * dp_shard} ranks, but the job has {world_size}; "
                "change a degree, or leave dp_shard at -1 to take what is left"
            )
        return Degrees(**given)

    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DIMS}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a global rank along every dimension."""
        found = {}
        for name in reversed(DIMS):
            rank, found[name] = divmod(rank, getattr(self, name))
        return {name: found[name] for name in DIMS}

    def ranks_along(self, rank: int, dims: Sequence[str]) -> tuple[int, ...]:
        """Global ranks, ascending, that differ from `rank` only in `dims`, itself included."""
        here = self.coordinates(rank)
        axes = [range(getattr(self, name)) if name in dims else (here[name],) for name in DIMS]
        strides = [math.prod(getattr(self, inner) for inner in DIMS[i + 1 :]) for i in range(len(DIMS))]
        return tuple(sum(c * s for c, s in zip(at, strides, strict=True)) for at in product(*axes))


def check_experts(degrees: Degrees, size: int) -> None:
    """Raises `ConfigError` if `size` ranks that share experts do not divide those that share one state."""
    ranks = math.prod(getattr(degrees, d) for d in SHARD_DIMS)
    if ranks % size:
        raise ConfigError(
            f"mesh.ep {size} does not divide the {ranks} ranks that share one state (dp_shard {degrees.dp_shard} x cp "
            f"{degrees.cp}), over which experts are spread; give a divisor"
        )


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share experts (`tokens` moves between them, `control` over CPU tensors), and those of a shard group that
    hold the same experts (`params`, `grads`)."""

    tokens: AnyCommunicator
    control: AnyCommunicator
    params: AnyCommunicator
    grads: AnyCommunicator

    @property
    def size(self) -> int:
        return self.tokens.size

    @staticmethod
    def of(fabric: Fabric, degrees: Degrees, size: int) -> ExpertRanks:
        """`size` neighbours of a shard group share the experts. Collective. Raises `ConfigError` if they do not divide it."""
        check_experts(degrees, size)
        shard = degrees.ranks_along(fabric.rank, SHARD_DIMS)
        group, place = divmod(shard.index(fabric.rank), size)
        together, same = shard[group * size : (group + 1) * size], shard[place::size]
        make = fabric.communicator
        return ExpertRanks(
            make("experts", together), make("experts control", together, control=True),
            make("expert params", same), make("expert grads", same),
        )  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the mesh and its communicators.

    Gathering and reducing have separate streams over the same ranks, so that they need no common order.
    `replicate_grads` joins the ranks that hold the same shard; `control` all ranks among which gradients are averaged,
    always over CPU tensors. `device_mesh`: torch's; None where there are no processes. `tensor` joins the ranks that share each
    layer (`tensor_control` over CPU tensors), `same_sample` those that share layers or a sequence and must be given the same
    batch, over CPU tensors. `everyone` joins all ranks, over CPU tensors.
    """

    degrees: Degrees
    rank: int
    device_mesh: DeviceMesh | None
    fabric: Fabric
    shard_params: AnyCommunicator
    shard_grads: AnyCommunicator
    replicate_grads: AnyCommunicator
    control: AnyCommunicator
    tensor: AnyCommunicator
    tensor_control: AnyCommunicator
    same_sample: AnyCommunicator
    experts: ExpertRanks | None = None
    job: AnyCommunicator | None = None  # where `control` does not join all ranks

    @property
    def everyone(self) -> AnyCommunicator:
        return self.job or self.control

    @staticmethod
    def over(fabric: Fabric, degrees: Degrees, device_mesh: DeviceMesh | None, ep: int = 1) -> Mesh:
        """The place of the fabric's rank, with its communicators. Collective over the world."""
        make = fabric.communicator
        shard = degrees.ranks_along(fabric.rank, SHARD_DIMS)
        return Mesh(
            degrees=degrees,
            rank=fabric.rank,
            device_mesh=device_mesh,
            fabric=fabric,
            shard_params=make("params", shard),
            shard_grads=make("grads", shard),
            replicate_grads=make("replicas", degrees.ranks_along(fabric.rank, ("dp_replicate",))),
            control=make("control", degrees.ranks_along(fabric.rank, DATA_DIMS), control=True),
            tensor=make("tensor", degrees.ranks_along(fabric.rank, ("tp",))),
            tensor_control=make("tensor control", degrees.ranks_along(fabric.rank, ("tp",)), control=True),
            same_sample=make("samples", degrees.ranks_along(fabric.rank, ("cp", "tp")), control=True),
            experts=ExpertRanks.of(fabric, degrees, ep) if ep > 1 else None,
            job=make("everyone", control=True) if degrees.pp * degrees.tp > 1 else None,
        )

    def coordinate(self, dim: str) -> int:
        return self.degrees.coordinates(self.rank)[dim]

    def ranks_along(self, *dims: str) -> tuple[int, ...]:
        return self.degrees.ranks_along(self.rank, dims)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks over which a gradient is averaged."""
        return math.prod(getattr(self.degrees, d) for d in DATA_DIMS)

    @property
    def sample_groups(self) -> int:
        """Number of groups of ranks that read different data."""
        return self.degrees.dp_replicate * self.degrees.dp_shard

    @property
    def sample_group(self) -> int:
        """Which of them this rank is in."""
        return self.coordinate("dp_replicate") * self.degrees.dp_shard + self.coordinate("dp_shard")

    def close(self) -> None:
        """Collective."""
        self.fabric.close()
        for group in self.device_mesh.get_all_groups() if self.device_mesh is not None else ():
            if group is not dist.group.WORLD:  # which a mesh of one dimension has
                dist.destroy_process_group(group)


def build_mesh(fabric: Fabric, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1, ep: int = 1) -> Mesh:
    """Builds the mesh of a job once, from degrees; `ep` folds over dp_shard and cp. Collective over the world."""
    degrees = Degrees.resolve(fabric.world_size, pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
    check_experts(degrees, ep)  # before any group is made
    # dimensions of one rank would cost one group for every rank of the world
    dims = [name for name in DIMS if getattr(degrees, name) > 1] or ["dp_shard"]
    shape = tuple(getattr(degrees, name) for name in dims)
    device_mesh = init_device_mesh(fabric.device.type, shape, mesh_dim_names=tuple(dims))
    return Mesh.over(fabric, degrees, device_mesh, ep)
