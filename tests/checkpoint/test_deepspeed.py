"""A run that DeepSpeed began goes on here as DeepSpeed itself would have gone on."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint import deepspeed_job
from tests.ranks import free_port, run_ranks
from zeroengine.checkpoint.deepspeed import DeepSpeedCheckpoint, loss_scale_state
from zeroengine.checkpoint.foreign_pickle import has_unknown, load_foreign
from zeroengine.errors import CheckpointError
from zeroengine.optim.scaler import LossScaler

PYTHON = os.environ.get("ZE_DEEPSPEED_PYTHON") or (sys.executable if importlib.util.find_spec("deepspeed") else None)
needs_deepspeed = pytest.mark.skipif(PYTHON is None, reason="no DeepSpeed here; ZE_DEEPSPEED_PYTHON names an interpreter")
UNIVERSAL = "global_step3_universal"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[float]]]]:
    """Checkpoints of DeepSpeed's on two ranks, and the losses of each rank after them."""
    folder, port = tmp_path_factory.mktemp("deepspeed"), str(free_port())
    processes, logs = [], [folder / f"log{rank}" for rank in range(2)]
    for rank in range(2):
        command = [str(PYTHON), deepspeed_job.__file__, str(rank), "2", port, str(folder)]
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
        with logs[rank].open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    try:
        for process in processes:
            process.wait(timeout=280)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [p.returncode for p in processes] == [0, 0], logs[0].read_text()[-3000:]
    return folder, [json.loads((folder / f"losses{rank}.json").read_text()) for rank in range(2)]


def _go_on(rank: int, world: int, folder: str, plans: list[tuple[str, int, str | None]]) -> list[Any]:
    """Each plan: (run, stage here, tag)."""
    import zeroengine

    found = []
    for name, stage, tag in plans:
        model = deepspeed_job.make_model()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            model.counted.zero_()
        extra = {k: v for k, v in deepspeed_job.RUNS[name].items() if k != "zero_optimization"}
        zero = {"stage": stage, "bucket_size": 700}
        health = {"comm_timeout": 60.0}  # on cores that others use too, a rank may get no time for longer than ten seconds
        config = {**deepspeed_job.CONFIG, **extra, "zero_optimization": zero, "health": health, "steps_per_print": None}
        engine, *_ = zeroengine.initialize(model=model, model_parameters=deepspeed_job.groups(model), config=config)
        path, client = engine.load_checkpoint(f"{folder}/{name}", tag=tag)
        masters = engine.full_state_dict()
        if engine.optimizer.masters[0].separate:
            pieces = [p for m in engine.optimizer.masters for _, p in m.pieces()]
        else:
            pieces = []
        right = torch.load(f"{folder}/{name}.pt", weights_only=True)
        same = all(torch.equal(p.data, right[p.name].reshape(-1)[p.start : p.start + p.data.numel()].float()) for p in pieces)
        if masters is not None:
            same = same and all(torch.equal(value, right[n].to(value.dtype)) for n, value in masters.items() if n in right)
            same = same and torch.equal(masters["counted"].float(), torch.arange(3.0) + 5)
        facts = (engine.global_steps, client, Path(str(path)).name)
        losses = deepspeed_job.train(engine, 3, 4, rank)
        found.append((same, facts, losses, engine.get_lr()))
        engine.save_checkpoint(f"{folder}/again-{name}-{stage}-{world}")
        engine.destroy()
    return found


@needs_deepspeed
def test_the_losses_go_on(runs: Any) -> None:
    folder, expected = runs
    plans: list[tuple[str, int, str | None]] = [
        ("1", 3, None), ("2", 2, None), ("3", 1, None), ("1", 0, UNIVERSAL), ("3", 3, UNIVERSAL), ("1-bf16", 2, None),
        ("3-bf16", 3, None),
    ]  # fmt: skip
    results = run_ranks(_go_on, 2, str(folder), plans, timeout=200)
    for rank in range(2):
        for (name, stage, tag), (same, facts, losses, rates) in zip(plans, results[rank], strict=True):
            told = f"rank {rank}, {name} -> stage {stage}, {tag}: {losses} for {expected[rank][name]}"
            assert same, told
            assert facts[0] == 3 and facts[1] == {"note": [name, 1]}, (told, facts)
            assert facts[2] == (tag or "global_step3")
            # Half types round gradients where DeepSpeed does not, and the other way round.
            assert losses == pytest.approx(expected[rank][name], rel=1e-5 if "16" not in name else 5e-3), told
            assert len(rates) == 2


@needs_deepspeed
def test_on_another_number_of_ranks(runs: Any) -> None:
    folder, _ = runs
    for world in (1, 3):
        for result in run_ranks(_go_on, world, str(folder), [("3", 2, None), ("1", 3, None)], timeout=100):
            assert all(same for same, *_ in result)


@needs_deepspeed
def test_what_is_missing_is_named(runs: Any, tmp_path: Path) -> None:
    folder, _ = runs
    shutil.copytree(folder / "1" / "global_step3", tmp_path / "a")
    next((tmp_path / "a").glob("*pp_rank_1*optim*")).unlink()
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks and lacks the optimizer states of \[1\]"):
        DeepSpeedCheckpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="round_robin_gradients"):  # its values are wrong, of which nothing else tells
        DeepSpeedCheckpoint(folder / "2" / UNIVERSAL)
    shutil.copytree(folder / "3" / "global_step3", tmp_path / "b")
    (tmp_path / "b" / "layer_00-model_states.pt").touch()
    with pytest.raises(CheckpointError, match="pipeline stages"):
        DeepSpeedCheckpoint(tmp_path / "b")


def test_the_loss_scale_goes_on() -> None:
    """DeepSpeed 0.19 has no fp16 on the CPU: its dynamic scaler's fields, and what they mean for the next doubling here."""
    scaler = SimpleNamespace(cur_scale=1024.0, cur_iter=7, last_overflow_iter=3, cur_hysteresis=2)
    assert loss_scale_state(scaler) == {"scale": 1024.0, "good_steps": 3, "credit": 2}
    ours = LossScaler(1.0, dynamic=True, window=4)
    ours.load_state_dict({**ours.state_dict(), **(loss_scale_state(scaler) or {})})
    for iteration in range(7, 11):  # DeepSpeed doubles where iteration - last overflow - 1 is a multiple of the window
        ours.update(False)
        assert ours.scale == 1024.0 * (2 if iteration - 3 - 1 >= 4 else 1), iteration
    assert loss_scale_state(SimpleNamespace(cur_scale=1.0, dynamic=False)) is None


def test_files_of_others_run_no_code(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class _Touch:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    class Other:
        pass

    Other.__qualname__ = "Other"
    sys.modules[__name__].Other = Other  # type: ignore[attr-defined]
    thing = Other()
    thing.__dict__["scale"] = 4.0
    torch.save({"evil": _Touch(), "thing": thing, "t": torch.ones(2), "n": [1, "a", None]}, tmp_path / "f.pt")
    found = load_foreign(tmp_path / "f.pt")
    assert not ran.exists()
    assert torch.equal(found["t"], torch.ones(2)) and found["n"] == [1, "a", None]
    assert found["thing"].scale == 4.0
    assert has_unknown(found["evil"]) and has_unknown([{"a": found["thing"]}]) and not has_unknown(found["n"])
    (tmp_path / "g.pt").write_bytes(b"not a file of torch's")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_foreign(tmp_path / "g.pt")
