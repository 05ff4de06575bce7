"""What the ranks must do alike, and what a call that is broken off leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import zeroengine
from tests.ranks import run_ranks
from zeroengine.errors import ConfigError, DivergenceError
from zeroengine.zero import GatheredParameters

STAGES = (0, 1, 2, 3)


def _config(stage: int, lr: float = 0.1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))


def _engine(stage: int, model: nn.Module | None = None, lr: float = 0.1, **more: Any) -> Any:
    return zeroengine.initialize(model=model or _model(), config=_config(stage, lr, **more))[0]


def _each_stage(rank: int, world: int, case: Callable[[int, int], None]) -> None:
    for stage in STAGES:
        case(rank, stage)


# --- cases, each at every stage ------------------------------------------------------------------------------------


def _frozen_edit(rank: int, stage: int) -> None:
    model = _model()
    model[0].weight.requires_grad_(False)
    engine = _engine(stage, model)
    with torch.no_grad(), GatheredParameters(list(model.parameters()), modifier_rank=1):
        if rank == 1:
            for p in model.parameters():
                p.fill_(7.0)
    with GatheredParameters(list(model.parameters())):
        assert all(bool((p == 7.0).all()) for p in model.parameters())
    with torch.no_grad(), GatheredParameters(list(model.parameters())):
        model[0].weight.fill_(3.0)
    with pytest.raises(DivergenceError, match="not to the same values on all ranks"):
        with torch.no_grad(), GatheredParameters(list(model.parameters())):
            model[0].weight.fill_(float(rank))
    if stage == 3:
        return  # its shards are of different edits now: nothing gathers them any more
    engine.destroy()
    assert not hasattr(model[0].weight, "_zero_frozen")


def _options(rank: int, stage: int) -> None:
    engine = _engine(stage)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    if rank == 1:  # as a schedule does that follows the rank's own loss
        engine.optimizer.param_groups[0]["lr"] = 0.05
    before = [p.detach().clone() for p in engine.module.parameters()] if stage < 3 else []
    engine.backward(engine(torch.ones(1, 4)).sum())
    with pytest.raises(DivergenceError, match="lr of parameter group 0 = .*ranks \\[1\\] differ from rank 0"):
        engine.step()
    assert all(bool((p == q).all()) for p, q in zip(engine.module.parameters(), before, strict=False))
    engine.destroy()


def _configuration(rank: int, stage: int) -> None:
    with pytest.raises(DivergenceError, match="gradient_clipping = .*the same configuration everywhere"):
        _engine(stage, gradient_clipping=1.0 + rank)
    _nothing_is_left(lambda: _engine(stage, gradient_clipping=1.0 + rank))
    _nothing_is_left(lambda: _engine(stage, nn.Linear(4, 4 + rank)))


def _nothing_is_left(make: Callable[[], Any]) -> None:
    """Of an engine that the ranks refuse for what they have unlike. Later ones count: some threads are the process'."""
    held = []
    for _ in range(2):
        with pytest.raises(DivergenceError):
            make()
        held.append((threading.active_count(), len(dist.distributed_c10d._world.pg_map)))
    assert held[0] == held[1], held


def _rollback(rank: int, stage: int, folder: str) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, which: int) -> Tensor:
            return (self.a, self.b)[which](x).sum()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Choosing()
    config = _config(stage)
    config["zero_optimization"]["leaf_module"] = {"classes": ["Choosing"]}
    engine = zeroengine.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, 4), 0))
    engine.step()
    engine.save_checkpoint(f"{folder}/{stage}", "one")
    engine.backward(engine(torch.ones(1, 4), rank))  # this loss is bad: back to the checkpoint
    engine.load_checkpoint(f"{folder}/{stage}", "one")
    engine.backward(engine(torch.ones(1, 4), 0))
    engine.step()
    engine.destroy()


def _refused(rank: int, stage: int) -> None:
    model = _model()
    with pytest.raises(ConfigError, match="warmup"):
        _engine(stage, model, scheduler={"type": "WarmupLR", "params": {"warmup_num_step": 3}})
    with pytest.raises(ConfigError, match="training_data is empty"):
        zeroengine.initialize(model=model, config=_config(stage), training_data=[])  # type: ignore[arg-type]
    engine = _engine(stage, model)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.stop = _model(), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner[0](x)
        if self.stop:
            raise KeyboardInterrupt
        return self.inner[2](y)  # type: ignore[no-any-return]


def _interrupt(rank: int, stage: int) -> None:
    model = Stopped()
    engine = _engine(stage, model)
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(1, 4))
    model.stop = False
    assert not engine.mechanism.sharder.computing() and not any(b.pins for b in engine.mechanism.buckets)
    if stage == 3:
        assert not any(b.full is not None for b in engine.mechanism.buckets)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _short_data(rank: int, stage: int) -> None:
    class Loss(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()  # type: ignore[no-any-return]

    engine = _engine(stage, Loss(*_model()), gradient_accumulation_steps=4)
    batch = torch.ones(1, 4)
    engine.train_batch(iter([batch] * 4))
    with pytest.raises(StopIteration):
        engine.train_batch(iter([batch] * 2))
    engine.train_batch(iter([batch] * 4))
    assert engine.global_steps == 2 and engine.micro_steps == 8
    engine.destroy()


CASES = {
    "frozen edit": _frozen_edit, "options": _options, "configuration": _configuration, "refused": _refused,
    "interrupt": _interrupt, "short data": _short_data,
}  # fmt: skip


def _case(rank: int, world: int, name: str) -> None:
    _each_stage(rank, world, CASES[name])


@pytest.mark.parametrize("name", list(CASES))
def test_at_every_stage(name: str) -> None:
    run_ranks(_case, 2, name, timeout=90)


def _rollbacks(rank: int, world: int, folder: str) -> None:
    for stage in STAGES:
        _rollback(rank, stage, folder)


def test_a_checkpoint_is_loaded_after_a_backward_that_differed(tmp_path: Path) -> None:
    run_ranks(_rollbacks, 2, str(tmp_path), timeout=90)


# --- data and mesh -------------------------------------------------------------------------------------------------


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(11.0))


def _iterable(rank: int, world: int) -> list[list[float]]:
    config = _config(0) | {"train_micro_batch_size_per_gpu": 2}
    engine, _, loader, _ = zeroengine.initialize(model=_model(), config=config, training_data=Counting())
    assert loader is not None
    with pytest.raises(ConfigError, match="training_data gives 2 samples"):
        engine.set_train_micro_batch_size(4)  # samples would be counted that nobody reads
    assert engine.get_batch_info() == (2 * world, 2, 1)
    return [batch.tolist() for batch in loader]


def test_ranks_share_the_samples_of_an_iterable_dataset() -> None:
    assert run_ranks(_iterable, 3, timeout=60) == [[[r, r + 3.0], [r + 6.0]] for r in range(3)]


def _given_mesh(rank: int, world: int) -> None:
    first = _engine(0)
    for key, more in (
        ("mesh.dp_replicate is 2", {"mesh": {"dp_replicate": 2}}),
        ("mics_shard_size is 1", {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}),
        ("health.comm_timeout is 3", {"health": {"comm_timeout": 3.0}}),
    ):
        with pytest.raises(ConfigError, match=key):
            zeroengine.initialize(model=_model(), config=_config(0) | more, mesh=first.mesh)
    same = {"mesh": {"dp_shard": 2, "tp": 1}, "health": {"comm_timeout": 10.0}}
    second = zeroengine.initialize(model=_model(), config=_config(1) | same, mesh=first.mesh)[0]
    second.destroy()
    first.destroy()


def test_a_mesh_that_the_configuration_contradicts_is_refused() -> None:
    run_ranks(_given_mesh, 2, timeout=60)


def _batch_of_shared_sequences(rank: int, world: int) -> tuple[int, int, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    engine = _engine(1, LlamaForCausalLM(tiny), mesh={"cp": 2})
    engine.set_train_batch_size(4)
    assert engine.get_batch_info() == (4, 1, 4)
    engine.set_train_micro_batch_size(2)
    return engine.get_batch_info()  # type: ignore[no-any-return]


def test_ranks_that_share_a_sequence_are_one_in_the_batch() -> None:
    assert run_ranks(_batch_of_shared_sequences, 2, timeout=60) == [(8, 2, 4)] * 2
