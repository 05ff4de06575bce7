"""docs/migration.md: every row holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.migrations import CHECKS, run
from tests.ranks import run_ranks

TEXT = (Path(__file__).parent.parent.parent / "docs" / "migration.md").read_text()
# Rows whose test is another file of this folder, or of the part that they are about.
ELSEWHERE = {
    "`deepspeed.pipe.PipelineModule`, `LayerSpec`, `TiedLayerSpec`",
    "`deepspeed.moe.layer.MoE`, `deepspeed.moe.utils`",
    "`deepspeed.sequence.layer.DistributedAttention`",
    "`deepspeed --num_gpus 8 train.py`",
    '`TrainingArguments(deepspeed=…)`, "auto"',
    "`accelerate launch --use_deepspeed`",
    "`from_pretrained` and `from_config` under ZeRO-3",
    "`model.save_pretrained` of the inner model at stage 3",
    "peft: LoRA, DoRA, `modules_to_save`, prompt tuning",
    "peft over weights of 4 bits (QLoRA)",
    '`ParallelismConfig(sp_backend="deepspeed", sp_size=…)`',
    "`offload_optimizer`, `offload_param` under a Trainer",
    "trl: SFTTrainer",
    "`bf16=True`, `fp16=True` on a machine without a GPU",
}


def rows() -> list[str]:
    found = re.findall(r"^\| (.+?) \| .+ \|$", TEXT, re.MULTILINE)
    return [text for text in found if not text.startswith("in ")]


def test_every_row_has_a_check() -> None:
    assert set(rows()) == set(CHECKS) | ELSEWHERE
    assert len(rows()) > 40


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(run, 2, str(tmp_path_factory.mktemp("migration")), timeout=150, server="stand_in")


@pytest.mark.parametrize("check", [check.__name__ for check in dict.fromkeys(CHECKS.values())])
def test_the_row_holds(check: str, outcomes: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcomes):
        assert not found[check], f"rank {rank}: {found[check]}"
