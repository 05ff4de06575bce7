"""What one number of ranks saves, any other number loads, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.common import DTYPES, REPLICATED, SHAPES, full, group, keys, own_values, pieces, start, wrong_bits
from tests.ranks import run_ranks
from zeroengine.checkpoint import find_checkpoint, load, save

WORLDS = (1, 2, 3, 4)


def _save(rank: int, world: int, directory: str) -> None:
    start(rank, world)
    folder = Path(directory) / f"from{world}" / "global_step3"
    save(folder, pieces(rank, world, filled=True), REPLICATED, own_values(rank), **group(rank, world))


def _load(rank: int, world: int, directory: str) -> list[str]:
    start(rank, world)
    problems: list[str] = []
    for saved in WORLDS:
        folder = find_checkpoint(Path(directory) / f"from{saved}", **group(rank, world))
        assert folder is not None and folder.name == "global_step3"
        # Other groups are whole here than when saving: stages change between runs.
        held = pieces(rank, world, filled=False, whole=("model",))
        found = load(folder, held, **group(rank, world))
        problems += [f"from {saved} ranks: {key}" for key in wrong_bits(held)]
        if found.replicated != REPLICATED or found.world != saved or found.missing or found.unexpected or found.converted:
            problems.append(f"from {saved} ranks: {found}")
        if saved == world:
            assert found.per_rank is not None and found.per_rank_note is None
            own = own_values(rank)
            if not torch.equal(found.per_rank.pop("torch"), own.pop("torch")) or found.per_rank != own:
                problems.append("another rank's own values")
        elif found.per_rank is not None or f"saved by {saved} ranks" not in (found.per_rank_note or ""):
            problems.append(f"from {saved} ranks: {found.per_rank_note}")
    return problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reshard")
    for world in WORLDS:
        run_ranks(_save, world, str(directory), timeout=60)
    return directory


@pytest.mark.parametrize("world", WORLDS)
def test_loads_at_any_number_of_ranks_bit_for_bit(saved: Path, world: int) -> None:
    assert run_ranks(_load, world, str(saved), timeout=60) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
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
