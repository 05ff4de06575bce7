"""What one number of ranks saves, any other number loads, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.checkpoint.common import DTYPES, REPLICATED, SHAPES, full, keys, own_values, pieces, start, wrong_bits
from tests.ranks import run_ranks
from zeroengine.checkpoint import find_checkpoint, load, save

WORLDS = (1, 2, 3, 4)


def _problems(rank: int, world: int, directory: Path, saved: int, group: dict[str, Any]) -> list[str]:
    folder = find_checkpoint(directory / f"from{saved}", **group)
    if folder is None or folder.name != "global_step3":
        return [f"found {folder}"]
    # Other keys are whole here than when saving: stages change between runs.
    held = {key: parts for key, parts in pieces(rank, world, filled=False, whole=("model",)).items() if parts}
    found = load(folder, held, **group)
    problems = [f"wrong bits of {key}" for key in wrong_bits(held)]
    if found.replicated != REPLICATED or found.world != saved or found.missing or found.unexpected or found.converted:
        problems.append(str(found))
    if saved == world:
        own, right = dict(found.per_rank or {}), own_values(rank)
        if not torch.equal(own.pop("torch"), right.pop("torch")) or own != right or found.per_rank_note:
            problems.append("not this rank's own values")
    elif found.per_rank is not None or f"saved by {saved} ranks" not in (found.per_rank_note or ""):
        problems.append(f"values of a rank without an heir: {found.per_rank_note}")
    return problems


def _matrix(rank: int, world: int, directory: str) -> dict[tuple[int, int], list[str]]:
    """The first 1, 2, 3 and 4 ranks each save; then each of these sets loads what each saved."""
    start(rank, world)
    groups = {n: dist.new_group(list(range(n))) for n in WORLDS}
    found: dict[tuple[int, int], list[str]] = {}
    for n in WORLDS:
        if rank < n:
            folder = Path(directory) / f"from{n}" / "global_step3"
            group = {"process_group": groups[n], "rank": rank, "world": n}
            save(folder, pieces(rank, n, filled=True), REPLICATED, own_values(rank), **group)
    dist.barrier()
    for n in WORLDS:
        if rank < n:
            group = {"process_group": groups[n], "rank": rank, "world": n}
            for saved in WORLDS:
                found[saved, n] = _problems(rank, n, Path(directory), saved, group)
    return found


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[tuple[int, int], list[str]]]]:
    directory = tmp_path_factory.mktemp("reshard")
    return directory, run_ranks(_matrix, 4, str(directory), timeout=150)


@pytest.fixture(scope="module")
def saved(matrix: tuple[Path, Any]) -> Path:
    return matrix[0]


@pytest.mark.parametrize("loading", WORLDS)
@pytest.mark.parametrize("saving", WORLDS)
def test_loads_at_any_number_of_ranks_bit_for_bit(matrix: tuple[Path, Any], saving: int, loading: int) -> None:
    assert [found[saving, loading] for found in matrix[1][:loading]] == [[]] * loading


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_loads_it_into_plain_tensors(saved: Path, world: int) -> None:
    state = {key: torch.zeros_like(full(key)) for key in keys()}
    dcp.load(state, checkpoint_id=saved / f"from{world}" / "global_step3", no_dist=True)
    for key, value in state.items():
        assert torch.equal(value.reshape(-1).view(torch.uint8), full(key).reshape(-1).view(torch.uint8)), key


def test_values_that_all_ranks_hold_are_written_once_and_by_all(saved: Path) -> None:
    index = dcp.FileSystemReader(saved / "from4" / "global_step3").read_metadata()
    writers: set[str] = set()
    for name in SHAPES:
        chunks = [i for i in index.storage_data if i.fqn == f"half.{name}"]
        assert len(chunks) == 1
        writers |= {index.storage_data[i].relative_path for i in chunks}
    assert len(writers) > 1


def test_every_rank_writes_only_its_own_bytes(saved: Path) -> None:
    index: Any = dcp.FileSystemReader(saved / "from3" / "global_step3").read_metadata()
    held = [pieces(rank, 3, filled=True) for rank in range(3)]
    for item, where in index.storage_data.items():
        rank = int(where.relative_path.split("_")[2])
        assert held[rank][item.fqn], f"rank {rank} wrote {item} of which it holds nothing"
    assert {index.state_dict_metadata[k].properties.dtype for k in keys()} == set(DTYPES.values())
