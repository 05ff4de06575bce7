"""Out of memory: the error, its remedies with their bytes, the snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, OutOfMemoryError
from zeroengine.monitor.exhausted import DeviceOutOfMemoryError, Layout, explain, is_exhaustion, remedies

MIB = 2**20
PLANNED = {"parameters": 100 * MIB, "gradients": 100 * MIB, "optimizer": 200 * MIB, "working": 0}
AT_STAGE = {2: {**PLANNED, "gradients": 25 * MIB}, 3: {**PLANNED, "gradients": 25 * MIB, "parameters": 25 * MIB, "working": 10 * MIB}}


def layout(**changes: Any) -> Layout:
    base: dict[str, Any] = {
        "stage": 1, "ranks": 4, "micro": 8, "accumulation": 2, "params_at": "none", "state_at": "none", "accelerator": True,
        "planned": PLANNED, "at_stage": AT_STAGE,
    }  # fmt: skip
    return Layout(**{**base, **changes})


def test_remedies_name_keys_and_bytes_the_most_first() -> None:
    found = remedies(layout(), {}, 64 * MIB)
    assert [(r.text, r.saves) for r in found[:-1]] == [
        ("zero_optimization.offload_optimizer.device: cpu", 200 * MIB),
        ("zero_optimization.stage: 3 (now 1)", 140 * MIB),
        ("zero_optimization.stage: 2 (now 1)", 75 * MIB),
        ("train_micro_batch_size_per_gpu: 4 (now 8) with gradient_accumulation_steps: 4, the same batch", 32 * MIB),
    ]
    assert "gradient_checkpointing_enable" in found[-1].text


@pytest.mark.parametrize(
    ("micro", "accumulation", "fewer", "times"), [(8, 2, 4, 4), (5, 1, 1, 5), (5, 2, 2, 5), (7, 3, 3, 7), (9, 1, 3, 3)]
)
def test_smaller_micro_batches_make_the_same_batch(micro: int, accumulation: int, fewer: int, times: int) -> None:
    (found,) = [r for r in remedies(layout(micro=micro, accumulation=accumulation), {}, micro * MIB) if "micro_batch" in r.text]
    words = f"train_micro_batch_size_per_gpu: {fewer} (now {micro}) with gradient_accumulation_steps: {times}, the same batch"
    assert (found.text, found.saves) == (words, (micro - fewer) * MIB) and fewer * times == micro * accumulation


@pytest.mark.parametrize(("several", "saves"), [(0, 32 * MIB), (30 * MIB, 2 * MIB), (32 * MIB, None), (40 * MIB, None)])
def test_what_several_micro_batches_keep_counts_against_them(several: int, saves: int | None) -> None:
    found = [r for r in remedies(layout(accumulation=1, several=several), {}, 64 * MIB) if "micro_batch" in r.text]
    assert [r.saves for r in found] == ([] if saves is None else [saves])


def test_remedies_that_cannot_help_are_not_named() -> None:
    texts = [r.text for r in remedies(layout(stage=3, at_stage={}, micro=1, state_at="cpu", params_at="cpu"), {}, 0)]
    assert len(texts) == 1
    assert "nvme with nvme_path" in remedies(layout(accelerator=False), {}, 0)[0].text
    assert all("stage: " not in r.text for r in remedies(layout(at_stage={2: PLANNED}), {}, 0))
    assert any("stage3_max_live_parameters" in r.text for r in remedies(layout(stage=3), {"working": 8}, 0))


def test_only_exhaustion_is_explained() -> None:
    assert is_exhaustion(MemoryError()) and is_exhaustion(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_exhaustion(OSError(12, "x")) and not is_exhaustion(OSError(2, "x"))
    assert is_exhaustion(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"))
    assert not is_exhaustion(RuntimeError("shapes differ")) and not is_exhaustion(OutOfMemoryError("again"))
    assert not is_exhaustion(ConfigError("out of memory"))


def test_an_accelerators_error_is_still_torchs() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    made = explain(error, "forward", 3, torch.device("cpu"), layout(), {"parameters": MIB}, None, [])
    assert isinstance(made, DeviceOutOfMemoryError) and isinstance(made, torch.OutOfMemoryError) and isinstance(made, MemoryError)
    assert "rank 3: out of memory in forward: CUDA out of memory" in str(made)


class Hungry(nn.Module):
    """Asks for too much, in forward or in backward, in the way that `how` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
        self.how = ""

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        if self.how == "tensor":
            torch.empty(1 << 58)
        elif self.how == "host":
            bytearray(1 << 62)
        elif self.how == "backward":
            out.register_hook(lambda grad: torch.empty(1 << 58))
        elif self.how == "other":
            raise RuntimeError("another fault")
        return out.square().mean()


def starve(rank: int, world: int, folder: str) -> dict[str, Any]:
    import zeroengine

    found: dict[str, Any] = {}
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "steps_per_print": None,
        "zero_optimization": {"stage": 1, "bucket_size": 80}, "monitor": {"run_dir": folder},
    }  # fmt: skip
    engine = zeroengine.initialize(model=Hungry(), config=config)[0]
    for how in ("tensor", "host", "backward", "other", ""):
        engine.module.how = how
        try:
            engine.backward(engine(torch.ones(4, 8)))
            engine.step()
        except Exception as error:
            found[how] = (type(error).__name__, str(error), isinstance(error, MemoryError), type(error.__cause__).__name__)
            if how == "backward":
                engine.zero_grad()
    found["steps"] = engine.global_steps
    return found


@pytest.mark.ranks
def test_errors_of_the_allocator_name_the_key_to_change(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(starve, 2, str(tmp_path), timeout=60)):
        for how, phase, cause in (("tensor", "forward", "RuntimeError"), ("host", "forward", "MemoryError"), ("backward", "backward", "")):
            kind, text, is_memory, caused = found[how]
            assert kind == "OutOfMemoryError" and is_memory and f"rank {rank}: out of memory in {phase}" in text, found[how]
            assert "zero_optimization.stage: 3 (now 1): saves" in text and "train_micro_batch_size_per_gpu: 2 (now 4)" in text
            assert not cause or caused == cause
        assert found["other"][0] == "RuntimeError" and found["steps"] == 1
        snapshot = json.loads((tmp_path / f"out-of-memory-{rank}.json").read_text())
        assert snapshot["phase"] == "backward" and snapshot["remedies"] and snapshot["largest_buckets"][0]["bytes"] > 0
        (fewer,) = [r["saves"] for r in snapshot["remedies"] if "train_micro_batch_size_per_gpu" in r["change"]]
        beyond = snapshot["resident"] + 2**50 - sum(snapshot["held"].values())
        planned = snapshot["planned"]  # with several micro-batches: the gradients' other half, and none that travel beside it
        assert beyond // 2 - fewer == planned["gradients"] - planned["working"] > 0
        assert snapshot["planned"]["optimizer"] == snapshot["held"]["optimizer"] or not snapshot["held"]["optimizer"]
