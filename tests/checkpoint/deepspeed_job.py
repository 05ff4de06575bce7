"""One rank of a DeepSpeed job, run by an interpreter that has DeepSpeed: saves in the middle of several runs and goes on.

python deepspeed_job.py RANK WORLD PORT FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUNS: dict[str, dict[str, Any]] = {
    "1": {"zero_optimization": {"stage": 1}},
    "2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "3": {"zero_optimization": {"stage": 3, "sub_group_size": 900, "stage3_param_persistence_threshold": 20}},
    "1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "3-bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 6, "warmup_type": "linear"}},
    "gradient_clipping": 1.0,
}


def make_model() -> Any:
    """Tied weights, a frozen layer, a buffer."""
    import torch

    from tests.engine.models import TinyLM

    torch.manual_seed(3)
    model = TinyLM(width=17, blocks=2)
    model.blocks[0].down.weight.requires_grad_(False)
    model.register_buffer("counted", torch.arange(3.0) + 5)
    return model


def groups(model: Any) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]


def train(engine: Any, first: int, count: int, rank: int) -> list[float]:
    from tests.engine.models import tokens

    losses = []
    for step in range(first, first + count):
        loss = engine(*tokens(step, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(rank: int, world: int, port: str, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # fmt: skip
    import deepspeed
    import torch
    from deepspeed.checkpoint.ds_to_universal import main as to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.set_num_threads(1)
    # Its collective over shared memory would be compiled first, which takes minutes; Gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {}
    for name, extra in RUNS.items():
        model = make_model()
        optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
        config = {**CONFIG, **extra, "zero_allow_untested_optimizer": True}
        del config["optimizer"]
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        train(engine, 0, 3, rank)
        engine.save_checkpoint(str(folder / name), client_state={"note": [name, 1]})
        found[name] = train(engine, 3, 4, rank)
        if rank == 0:
            whole = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), tag="global_step3")
            torch.save({k: v.clone() for k, v in whole.items()}, folder / f"{name}.pt")
            if name in ("1", "2", "3"):
                source = folder / name / "global_step3"
                to_universal(argparse.Namespace(
                    input_folder=str(source), output_folder=f"{source}_universal", num_extract_workers=1, num_merge_workers=1,
                    keep_temp_folder=False, strict=True, inject_missing_state=True,
                ))  # fmt: skip
        engine.destroy()
    (folder / f"losses{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
