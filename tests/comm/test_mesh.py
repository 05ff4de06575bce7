"""Degrees, positions and groups of the mesh."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from zeroengine.comm import Fabric, init_distributed
from zeroengine.errors import ConfigError
from zeroengine.mesh import DATA_DIMS, SHARD_DIMS, Degrees, build_mesh


def test_degrees() -> None:
    d = Degrees.resolve(16, pp=2, tp=2, dp_replicate=2)
    assert d == Degrees(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2)
    assert d.coordinates(13) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "cp": 0, "tp": 1}
    assert d.ranks_along(13, ("tp",)) == (12, 13)
    assert d.ranks_along(13, ("dp_shard",)) == (13, 15)
    assert d.ranks_along(13, DATA_DIMS) == (9, 11, 13, 15)
    assert d.ranks_along(13, ("pp",)) == (5, 13)
    assert Degrees.resolve(8, cp=2).ranks_along(3, SHARD_DIMS) == tuple(range(8))


@pytest.mark.parametrize(
    ("world", "degrees", "says"),
    [
        (8, {"tp": 3}, r"tp 3 = 3 does not divide 8 ranks"),
        (8, {"pp": 2, "tp": 2, "dp_shard": 4}, r"pp 2 x dp_shard 4 x tp 2 = 16 ranks, but the job has 8"),
        (8, {"dp_shard": 4}, r"dp_shard 4 = 4 ranks, but the job has 8"),
        (8, {"cp": 0}, r"mesh\.cp = 0"),
        (8, {"dp_shard": 0}, r"mesh\.dp_shard = 0: must be -1"),
        (2, {"dp_replicate": 4}, r"dp_replicate 4 = 4 does not divide 2"),
    ],
)
def test_impossible_degrees(world: int, degrees: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Degrees.resolve(world, **degrees)


def _groups(rank: int, world: int) -> dict[str, object]:
    init_distributed(verbose=False)
    mesh = build_mesh(Fabric(timeout=20), tp=2, dp_replicate=2)
    assert mesh.device_mesh.mesh_dim_names == ("dp_replicate", "tp")
    assert mesh.device_mesh["tp"].size() == 2
    value = torch.tensor([float(rank)])
    mesh.control.all_reduce(value, "sum of ranks").wait()
    out = {
        "shard": mesh.shard_params.ranks, "replicas": mesh.replicate_grads.ranks, "control": mesh.control.ranks,
        "tp": mesh.ranks_along("tp"), "at": mesh.coordinate("dp_replicate"), "sum": value.item(),
        "size": mesh.data_parallel_size,
    }  # fmt: skip
    mesh.close()
    return out


def test_groups() -> None:
    for rank, got in enumerate(run_ranks(_groups, 4, timeout=60)):
        twin = (rank + 2) % 4
        pair = tuple(sorted((rank, twin)))
        assert got["shard"] == (rank,) and got["replicas"] == pair and got["control"] == pair
        assert got["tp"] == ((0, 1), (2, 3))[rank // 2] and got["at"] == rank // 2
        assert got["sum"] == rank + twin and got["size"] == 2
