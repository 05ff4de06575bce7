"""What users of other engines suffered from when they resumed: step counts, other ranks, files of other ranks, half a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zeroengine
from tests.checkpoint.engines import Awkward, build, fill, held, scramble, train, wrong
from tests.engine.models import TinyLM, config
from tests.ranks import run_ranks
from zeroengine.checkpoint import SavedCheckpoint, export_weights
from zeroengine.errors import CheckpointError

OPTIMIZERS: dict[str, Any] = {
    "engine AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "engine Adam": {"type": "Adam", "params": {"lr": 1e-2}},
    "engine Muon": {"type": "Muon", "params": {"lr": 1e-2}},
    "torch AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "torch fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "torch NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "torch Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def _engine(stage: int, optimizer: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    given: dict[str, Any] = {"optimizer": optimizer} if callable(optimizer) else {}
    settings = config(stage, **({} if callable(optimizer) else {"optimizer": optimizer}))
    return zeroengine.initialize(model=TinyLM(blocks=1), config=settings, **given)[0]


def _three_and_three(rank: int, world: int, folder: str) -> dict[str, list[bool]]:
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        for stage in (1, 3):
            at = f"{folder}/{name}/{stage}"
            engine = _engine(stage, optimizer, 1)
            train(engine, 0, 3, rank)
            engine.save_checkpoint(at)
            losses = train(engine, 3, 3, rank)
            state = {k: [p.data.clone() for p in parts] for k, parts in held(engine).items()}
            engine.destroy()
            engine = _engine(stage, optimizer, 2)
            engine.load_checkpoint(at)
            again = train(engine, 3, 3, rank)
            after = {k: [p.data for p in parts] for k, parts in held(engine).items()}
            same = state.keys() == after.keys() and all(torch.equal(a, b) for k in state for a, b in zip(state[k], after[k], strict=True))
            engine.destroy()
            found[f"{name} at stage {stage}"] = [again == losses, same]
    return found


def test_step_counts_and_all_else_of_every_optimizer_come_back(tmp_path: Path) -> None:
    """3 + 3 steps are 6 steps, to the last bit."""
    for rank, found in enumerate(run_ranks(_three_and_three, 2, str(tmp_path), timeout=150)):
        assert {name: result for name, result in found.items() if result != [True, True]} == {}, f"rank {rank}"


def _load_and_save(rank: int, world: int, folder: str, load: str | None, save: str) -> list[str]:
    engine = build(3 if load is None else 1, "bf16", seed=world)
    if load is None:
        fill(engine)
    else:
        scramble(engine)
        engine.load_checkpoint(folder, tag=load)
    problems = wrong(engine)
    engine.save_checkpoint(folder, tag=save)
    engine.destroy()
    return problems


def test_a_loaded_checkpoint_is_saved_completely_again(tmp_path: Path) -> None:
    """By other numbers of ranks, in turn; with nothing of the user's in it, files say all that is needed."""
    chain = [(2, None, "a"), (3, "a", "b"), (1, "b", "c"), (2, "c", "d")]
    for world, load, save in chain:
        assert run_ranks(_load_and_save, world, str(tmp_path), load, save, timeout=100) == [[]] * world
    first, last = SavedCheckpoint(tmp_path, "a"), SavedCheckpoint(tmp_path, "d")
    assert first.index == last.index and not list(last.damaged())
    assert all(torch.equal(first.read(key), last.read(key)) for key in first.index)
    assert {k: v for k, v in first.values().items() if k != "scheduler"} == {k: v for k, v in last.values().items() if k != "scheduler"}


def _two_groups(rank: int, world: int, folder: str) -> Any:
    torch.manual_seed(4)
    model = Awkward()
    decays = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decays, "weight_decay": 0.1}]
    settings = config(2, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}, bf16={"enabled": True})
    engine, *_ = zeroengine.initialize(model=model, model_parameters=groups, config=settings)
    train(engine, 0, 2, rank)
    engine.save_checkpoint(folder)
    masters = [(p.name, p.start, p.data.tolist()) for _, p in engine.optimizer.pieces()]
    return engine.full_state_dict(), masters


@pytest.mark.parametrize("world", [2, 3])
def test_export_with_groups_padding_ties_a_frozen_layer_and_buffers(tmp_path: Path, world: int) -> None:
    results = run_ranks(_two_groups, world, str(tmp_path / "run"), timeout=100)
    live = results[0][0]
    for format, size in (("safetensors", 10**9), ("safetensors", 3000), ("torch", 3000)):
        out = tmp_path / f"{format}-{size}"
        export_weights(SavedCheckpoint(tmp_path / "run"), out, format=format, dtype=torch.float32, shard_bytes=size)
        found = _read_folder(out)
        assert set(found) >= set(live) - {"head.weight"}
        for _, masters in results:
            for name, start, values in masters:
                assert found[name].dtype is torch.float32
                assert torch.equal(found[name].flatten()[start : start + len(values)], torch.tensor(values)), name
        for name in ("frozen.weight", "turned", "seen"):
            assert torch.equal(found[name], live[name].to(found[name].dtype)), name


def _read_folder(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            found.update(load_file(file))
        elif file.suffix == ".bin":
            found.update(torch.load(file, weights_only=True))
    return found


def _bytes_read(rank: int, world: int, folder: str) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    settings = config(3, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    engine, *_ = zeroengine.initialize(model=model, config=settings)
    engine.backward(engine(torch.ones(2, 256)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)  # what Python reads of its own at a first load
    before = _read_so_far()
    engine.load_checkpoint(folder)
    read = _read_so_far() - before
    share = sum(p.data.nbytes for parts in held(engine).values() for p in parts)
    engine.destroy()
    return read, share, sum(f.stat().st_size for f in Path(folder).glob("*/*"))


def _read_so_far() -> int:
    """Bytes that this process has asked files for."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what a process reads")
def test_a_rank_reads_its_own_share(tmp_path: Path) -> None:
    """Once to compare checksums, and once for the values."""
    for read, share, total in run_ranks(_bytes_read, 4, str(tmp_path), timeout=100):
        assert share < 0.3 * total
        assert share <= read < 2.2 * share + 300_000


def _own_folder(rank: int, world: int, folder: str) -> list[str]:
    """Each node has a disk of its own."""
    engine = build(1)
    told = []
    calls: list[Callable[[], Any]] = [
        lambda: engine.save_checkpoint(f"{folder}/node{rank}"),
        lambda: engine.load_checkpoint(f"{folder}/node{rank}"),
    ]
    for call in calls:
        try:
            call()
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
        if rank == 0 and len(told) == 1:
            (Path(folder) / "node0").mkdir(exist_ok=True)
    losses = train(engine, 0, 1, rank)
    engine.save_checkpoint(f"{folder}/shared")
    if rank == 0:
        (Path(folder) / "shared").rename(Path(folder) / "node0" / "shared")
    engine.mechanism.groups.control.barrier("moved")
    try:
        engine.load_checkpoint(f"{folder}/node{rank}/shared")
    except CheckpointError as error:
        told.append(str(error))
    engine.destroy()
    return [*told, str(losses[0] > 0)]


def test_disks_of_nodes_are_told_before_training_starts(tmp_path: Path) -> None:
    for saving, nothing, loading, trained in run_ranks(_own_folder, 2, str(tmp_path), timeout=100):
        assert "not visible here" in saving and "rank 1" in saving
        assert nothing == ""  # rank 0 sees that there is none, and all start afresh
        assert "failed on rank 1" in loading and "node1" in loading
        assert trained == "True"


def _without_position(rank: int, world: int, folder: str) -> list[Any]:
    """As checkpoints were before they knew where the data stood, and as they are without a loader of the engine's."""
    data = TensorDataset(torch.arange(20.0).view(20, 1))
    found: list[Any] = []
    for kept in ({"epoch": 2}, {"data": None}):
        torch.manual_seed(0)
        engine, _, loader, _ = zeroengine.initialize(model=nn.Linear(1, 1), config=config(1), training_data=data)
        assert loader is not None
        counters = engine._counters

        def old(kept: dict[str, Any] = kept, counters: Any = counters) -> dict[str, Any]:
            return {**{k: v for k, v in counters().items() if k != "data"}, **kept}

        engine._counters = old
        for _ in loader:
            pass
        engine.global_steps = engine.optimizer.skipped_steps = 5
        engine.save_checkpoint(folder)
        engine.global_steps = 0
        path, _ = engine.load_checkpoint(folder)
        found.append((path is not None, engine.global_steps, loader.epoch, loader.position, len(list(loader))))
        engine.destroy()
    return found


def test_a_checkpoint_that_does_not_say_where_the_data_stood(tmp_path: Path) -> None:
    for found in run_ranks(_without_position, 2, str(tmp_path), timeout=60):
        assert found == [(True, 5, 1, 0, 5), (True, 5, 0, 0, 5)]
