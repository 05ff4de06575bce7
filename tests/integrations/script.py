"""A training script as they are written for DeepSpeed. Its ranks run it in a test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.integrations.tiny import stand_in


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from deepspeed import checkpointing

        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(checkpointing.checkpoint(layer, x))
        return self.head(x)


def get_args(folder: Path, config: dict[str, Any]) -> argparse.Namespace:
    import deepspeed

    path = folder / f"ds_config_{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args(["--deepspeed", "--deepspeed_config", str(path), "--local_rank", "0"])


def z3_params_to_fetch(params: Any) -> list[Any]:
    """DeepSpeed-Chat's way to find what must be gathered."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def main(rank: int, world: int, folder: str, stages: list[int]) -> list[dict[str, Any]]:
    stand_in()
    results = []
    for stage in stages:
        place = Path(folder) / f"stage{stage}"
        place.mkdir(exist_ok=True)
        results.append(train(rank, place, stage))
    return results


def train(rank: int, folder: Path, stage: int) -> dict[str, Any]:
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    assert dist.is_initialized() and dist.get_rank() == rank
    logger.info("training on %s", get_accelerator().device_name())
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": 1000,
    }
    args = get_args(folder, config)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = Net()
    data = [(torch.arange(i, i + 6) % 20, torch.arange(i + 1, i + 7) % 20) for i in range(64)]
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args, model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], training_data=data
    )
    losses: list[float] = []
    for ids, labels in loader:
        loss = nn.functional.cross_entropy(engine(ids.to(engine.device)).flatten(0, 1), labels.to(engine.device).flatten())
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        if boundary and len(losses) == 1:
            grad = safe_get_full_grad(model.head.weight)
            assert grad is not None and grad.shape == model.head.weight.shape and bool(grad.any())
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    head = model.head.weight
    whole = safe_get_full_fp32_param(head)
    assert safe_get_full_optimizer_state(head, "exp_avg").shape == whole.shape
    to_fetch = z3_params_to_fetch(model.parameters())
    assert bool(to_fetch) == (stage == 3)
    with deepspeed.zero.GatheredParameters(to_fetch, modifier_rank=None, enabled=stage == 3):
        same = torch.equal(head.detach().float(), whole)
    engine.save_checkpoint(str(folder), tag="last", client_state={"losses": losses})
    before = engine.get_lr()
    names = facts(engine)
    engine.set_train_batch_size(16)
    assert engine.gradient_accumulation_steps() == 4 and engine.train_batch_size() == 16
    path, client = engine.load_checkpoint(str(folder))
    assert path is not None and client["losses"] == losses and engine.get_lr() == before
    engine.save_16bit_model(str(folder), "weights.bin")
    dist.barrier()
    result = {"losses": losses, "same": same, "lr": before, "names": names}
    engine.destroy()
    dist.barrier()
    if rank == 0:
        result["exported"] = exported(folder, model)
    dist.barrier()
    return result


def facts(engine: Any) -> dict[str, Any]:
    import deepspeed

    assert isinstance(engine, deepspeed.DeepSpeedEngine) and engine.module is not engine
    return {
        "bf16": engine.bfloat16_enabled(), "fp16": engine.fp16_enabled(), "world": engine.world_size,
        "stage": engine.zero_optimization_stage(), "batch": engine.get_batch_info(), "optimizer": engine.optimizer_name(),
        "scheduler": engine.scheduler_name(), "group": deepspeed.comm.get_world_size(engine.data_parallel_group),
        "momentum": engine.get_mom(),
    }  # fmt: skip


def exported(folder: Path, model: nn.Module) -> dict[str, bool]:
    """Whether each way to get the weights out gives those of the (now ordinary) model."""
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
    )

    expected = model.state_dict()
    convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(folder / "whole"), max_shard_size="2KB")
    parts: dict[str, torch.Tensor] = {}
    for path in (folder / "whole").glob("pytorch_model-*.bin"):
        parts |= torch.load(path, weights_only=True)
    states = {
        "state_dict": get_fp32_state_dict_from_zero_checkpoint(str(folder)),
        "into_model": load_state_dict_from_zero_checkpoint(Net(), str(folder)).state_dict(),
        "files": parts,
        "16bit": torch.load(folder / "weights.bin", weights_only=True),
    }
    return {
        name: state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in expected)
        for name, state in states.items()
    }
