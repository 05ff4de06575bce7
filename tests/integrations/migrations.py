"""What the ranks run for the rows of docs/migration.md: one check for each."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.integrations.tiny import stand_in
from zeroengine.errors import ConfigError, DivergenceError, MovedGradientError, ReleasedParameterError, ZeroEngineError

Check = Callable[[Path], None]
CHECKS: dict[str, Check] = {}


def row(*texts: str) -> Callable[[Check], Check]:
    """Names the rows, by their left cell, that a check is for."""

    def keep(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(texts, check))
        return check

    return keep


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": {"stage": stage}, **more}


@contextlib.contextmanager
def engine(stage: int = 3, net: nn.Module | None = None, **more: Any) -> Iterator[Any]:
    import deepspeed

    net = model() if net is None else net
    made, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config(stage, **more))
    try:
        yield made
    finally:
        made.destroy()


def loss_of(made: Any, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed + 10 * made.global_rank))
    return made(x.to(made.device)).float().square().mean()


def step(made: Any, seed: int = 0) -> float:
    loss = loss_of(made, seed)
    made.backward(loss)
    made.step()
    return float(loss.detach())


def refused(act: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    try:
        act()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def whole(made: Any) -> list[torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(made.module.parameters()):
        return [p.detach().clone() for p in made.module.parameters()]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of the engine's log inside the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zeroengine")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


@row("`deepspeed.initialize(args, model, optimizer, model_parameters, training_data, lr_scheduler, config=…)`")
def initialize_forms(folder: Path) -> None:
    import json

    import deepspeed

    path = folder / f"config{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(config()))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    data = [(torch.zeros(8), torch.zeros(4))] * 8
    for how in ({"args": args}, {"config": str(path)}, {"config_params": config()}):
        made, optimizer, loader, schedule = deepspeed.initialize(model=model(), training_data=data, **how)
        assert optimizer is made.optimizer and len(loader) == 2 and schedule is None
        made.destroy()
    bare = {k: v for k, v in config().items() if k != "optimizer"}
    made, optimizer, _, schedule = deepspeed.initialize(
        model=model(), model_parameters=None, config=bare, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    )  # fmt: skip
    step(made)
    assert made.optimizer_name() == "SGD" and optimizer.param_groups[0]["lr"] == 0.25 and made.scheduler_name() == "StepLR"
    made.destroy()


@row("`deepspeed.initialize(mpu=…, mesh_param=…)`")
def initialize_refuses(folder: Path) -> None:
    import deepspeed

    refused(lambda: deepspeed.initialize(model=model(), config=config(), mpu=object()), ConfigError, "mesh")
    refused(lambda: deepspeed.initialize(model=model(), config=config(), mesh_param=(2, 1)), ConfigError, "mesh")
    refused(lambda: deepspeed.initialize(model=model(), config=config(), no_such=1), TypeError, "no_such")


@row("`deepspeed.init_distributed()`, `deepspeed.comm`")
def communication(folder: Path) -> None:
    import deepspeed
    import deepspeed.comm as dist

    deepspeed.init_distributed(dist_backend="gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    out = torch.empty(4)
    dist.allgather_fn(out, x)
    assert dist.get_world_size() == 2 and x.tolist() == [2, 2] and out.tolist() == [2] * 4
    assert dist.get_world_size(dist.get_world_group()) == 2 and dist.get_all_ranks_from_group() == [0, 1]


@row("`engine(…)`, `engine.backward(loss)`, `engine.step()`")
def three_calls(folder: Path) -> None:
    with engine() as one:
        step(one)
        first = whole(one)
    with engine() as two:
        loss_of(two).backward()
        two.step()
        assert all(torch.equal(a, b) for a, b in zip(first, whole(two), strict=True))


@row("`engine.backward(loss, scale_wrt_gas=False)`, `engine.set_gradient_accumulation_boundary(…)`")
def boundaries(folder: Path) -> None:
    with engine(gradient_accumulation_steps=2) as one:
        step(one, 1)
        step(one, 2)
        first = whole(one)
    with engine() as two:
        for seed, last in ((1, False), (2, True)):
            two.set_gradient_accumulation_boundary(is_boundary=last)
            two.backward(loss_of(two, seed) / 2, scale_wrt_gas=False)
        two.step()
        assert two.global_steps == 1
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(first, whole(two), strict=True))


@row("`engine.no_sync()` at stages 2 and 3", "`model.set_requires_gradient_sync(False)`")
def no_sync(folder: Path) -> None:
    results = []
    for skip in (False, True):
        with engine(2, gradient_accumulation_steps=2) as made:
            with made.no_sync() if skip else contextlib.nullcontext():
                step(made, 1)
            step(made, 2)
            results.append(whole(made))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*results, strict=True))


@row("`engine.get_global_grad_norm()` before the first step")
def norm(folder: Path) -> None:
    with engine() as made:
        assert made.get_global_grad_norm() is None
        step(made)
        assert made.get_global_grad_norm() > 0


@row("`engine.allreduce_gradients()`")
def reduce_by_hand(folder: Path) -> None:
    with engine() as made, logged() as said:
        made.backward(loss_of(made))
        made.allreduce_gradients()
        made.step()
        assert made.global_rank or any("allreduce_gradients has no effect" in line for line in said)


@row("`engine.set_train_batch_size`, `set_train_micro_batch_size`, `get_batch_info`, `get_lr`, `set_lr`, `get_mom`")
def batch_and_rates(folder: Path) -> None:
    with engine() as made:
        step(made)
        made.set_train_batch_size(8)
        assert made.get_batch_info() == (8, 2, 2) and not made.is_gradient_accumulation_boundary()
        step(made)
        step(made)
        assert made.global_steps == 2
        made.set_train_micro_batch_size(4)
        assert made.get_batch_info() == (16, 4, 2)
        refused(lambda: made.set_train_batch_size(7), ConfigError, "7", "8")
        made.set_lr(0.5)
        assert made.get_lr() == [0.5] and made.get_mom() == [(0.9, 0.999)]


@row("`engine.compile(backend=…)`")
def compiles(folder: Path) -> None:
    with engine(2) as one:
        expected = [step(one, s) for s in range(2)]
    with engine(2) as made:
        made.compile(backend="eager", compile_kwargs={})
        assert made.is_compiled
        assert [step(made, s) for s in range(2)] == expected
        refused(lambda: made.compile(schedule=[]), ConfigError, "schedule")
    with engine(3) as sharded:
        refused(lambda: sharded.compile(backend="eager"), ConfigError, "stage 3", "block.compile()")
        for block in sharded.module:
            block.compile(backend="eager")
        assert [step(sharded, s) for s in range(2)] == expected


@row("`engine.save_checkpoint`, `load_checkpoint`", "torch.distributed.checkpoint of the sharded state")
def checkpoints(folder: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    with engine(3) as made:
        step(made)
        made.save_checkpoint(str(folder / "c"), client_state={"epoch": 3})
        expected = step(made, 1)
    with engine(1) as other:
        path, client = other.load_checkpoint(str(folder / "c"))
        assert path is not None and path.endswith("global_step1") and client == {"epoch": 3}
        assert abs(step(other, 1) - expected) < 1e-6
    keys = set(FileSystemReader(folder / "c" / "global_step1").read_metadata().state_dict_metadata)
    assert {"model.0.weight", "optim.0.weight.exp_avg"} <= keys


@row(
    "`engine.save_16bit_model`, `stage3_gather_16bit_weights_on_model_save`", "`zero_to_fp32.py` in the checkpoint's folder",
    "`get_model_state_dict(full_state_dict=True)`",
)  # fmt: skip
def weights_out(folder: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with engine() as made:
        step(made)
        made.save_16bit_model(str(folder), "w.bin")
        made.save_checkpoint(str(folder / "z"))
        state, values = made.full_state_dict(), whole(made)
        assert (state is None) == (made.global_rank != 0)
        torch.distributed.barrier()
        names = [n for n, _ in made.module.named_parameters()]
        for found in (torch.load(folder / "w.bin"), get_fp32_state_dict_from_zero_checkpoint(folder / "z"), state):
            assert found is None or all(torch.equal(found[n], v) for n, v in zip(names, values, strict=True))


@row("`deepspeed.zero.Init()`, `GatheredParameters`", "`FSDP.summon_full_params`, `full_tensor()`")
def gather(folder: Path) -> None:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config()):
        net = model()
    with engine(net=net) as made:
        weight = net[0].weight
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            if made.global_rank == 0:
                weight.data.fill_(0.25)
        with deepspeed.zero.GatheredParameters([weight]):
            assert bool((weight == 0.25).all())

        def unequal() -> None:
            with deepspeed.zero.GatheredParameters(weight):
                weight.data.fill_(float(made.global_rank))

        refused(unequal, DivergenceError, "modifier_rank")


@row("a weight of stage 3 read outside a gather (empty in DeepSpeed)")
def read_outside(folder: Path) -> None:
    with engine() as made:
        weight = made.module[0].weight
        assert weight.shape == (16, 8) and weight.numel() == 128 and weight.dtype is torch.float32
        refused(lambda: weight.sum(), ReleasedParameterError, "0.weight", "GatheredParameters")


@row("`param.ds_id`, `ds_status`, `ds_shape`, `ds_numel`", "`deepspeed.zero.register_external_parameter`")
def marks(folder: Path) -> None:
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    with engine() as made:
        weight = made.module[0].weight
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE and weight.ds_numel == 128 and tuple(weight.ds_shape) == (16, 8)
        deepspeed.zero.register_external_parameter(made.module, weight)
        with deepspeed.zero.GatheredParameters(weight):
            assert not hasattr(weight, "ds_id")


@row("`deepspeed.utils.safe_get_full_*`, `safe_set_full_*`, `set_z3_leaf_modules`")
def safe_access(folder: Path) -> None:
    import deepspeed
    from deepspeed import utils

    net = model()
    assert utils.set_z3_leaf_modules(net, [nn.Sequential]) == [net]
    with engine(net=net) as made:
        made.backward(loss_of(made))
        grad = utils.safe_get_full_grad(net[0].weight)
        made.step()
        moment = utils.safe_get_full_optimizer_state(net[0].weight, "exp_avg")
        assert torch.allclose(moment, grad * 0.1)
        utils.safe_set_full_fp32_param(net[0].weight, torch.ones(16, 8))
        with deepspeed.zero.GatheredParameters(net[0].weight):
            assert bool((net[0].weight == 1).all())


@row("`deepspeed.checkpointing.checkpoint`")
def recomputation(folder: Path) -> None:
    import deepspeed

    calls = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(8, 8)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return torch.tanh(self.inner(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return deepspeed.checkpointing.checkpoint(self.part, x)

    with engine(net=Net()) as made:
        step(made)
        assert len(calls) == 2
    deepspeed.checkpointing.configure(None, num_checkpoints=2)
    assert deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)  # on the CPU they are there: the same values
    with engine(net=Net()) as made:
        step(made)
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=False)
    for name in ("partition_activations", "contiguous_checkpointing"):
        refused(lambda n=name: deepspeed.checkpointing.configure(None, **{n: True}), ConfigError, name)


@row("`deepspeed.ops.adam.FusedAdam`, `DeepSpeedCPUAdam`, `ops.lion`, `ops.adagrad`, `ops.lamb.FusedLamb`")
def optimizers(folder: Path) -> None:
    import deepspeed
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    bare = {k: v for k, v in config().items() if k != "optimizer"}
    for kind in (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb):
        net = model()
        made, *_ = deepspeed.initialize(model=net, config=bare, optimizer=kind(net.parameters(), lr=0.01))
        before = whole(made)
        step(made)
        assert any(not torch.equal(a, b) for a, b in zip(before, whole(made), strict=True)), kind
        made.destroy()


@row(
    "`deepspeed.init_inference`, `deepspeed.inference`",
    "`DeepSpeedTransformerLayer`, `ops.sparse_attention`, `compression`, `runtime.data_pipeline`",
)
def refusals(folder: Path) -> None:
    import deepspeed

    refused(lambda: deepspeed.init_inference(model()), ZeroEngineError, "inference engine")
    refused(lambda: deepspeed.DeepSpeedTransformerLayer(), ZeroEngineError, "scaled_dot_product_attention")
    for name in ("inference.v2", "ops.sparse_attention", "compression.compress", "runtime.data_pipeline.data_sampling"):
        refused(lambda n=name: importlib.import_module(f"deepspeed.{n}"), ModuleNotFoundError, name.split(".")[0])


@row("`deepspeed.tp_model_init(model, tp_size, …)`")
def split_layers(folder: Path) -> None:
    import deepspeed
    from transformers import LlamaForCausalLM

    from tests.integrations.tiny import model_config

    split = {"tensor_parallel": {"autotp_size": 2}}
    net = deepspeed.tp_model_init(LlamaForCausalLM(model_config()), tp_size=2, dtype=torch.float32, config=split)
    ids = torch.arange(3, 9)[None]
    expected = float(net(input_ids=ids, labels=ids).loss.detach())
    with engine(1, net=net, **split) as made:
        assert made.mesh.degrees.tp == 2 and made.dp_world_size == 1
        loss = made(input_ids=ids, labels=ids).loss
        assert abs(float(loss.detach()) - expected) < 1e-5
        made.backward(loss)
        made.step()
    refused(lambda: deepspeed.tp_model_init(model(), 4, config=split), ConfigError, "tensor_parallel.autotp_size", "4")
    other = deepspeed.tp_model_init(model(), tp_size=2)
    refused(lambda: deepspeed.initialize(model=other, config=config()), ConfigError, "tp_model_init", "2")


@row("`engine.offload_states(include=…, device=…)`, `engine.reload_states()`")
def parking(folder: Path) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    with engine() as one:
        expected = [step(one, s) for s in range(3)]
    with engine() as made:
        got = [step(made, s) for s in range(2)]
        kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_params]
        made.offload_states(include=kinds, device=OffloadDeviceEnum.nvme, nvme_path=str(folder))
        refused(lambda: step(made, 2), ZeroEngineError, "reload_states")
        made.reload_states()
        assert [*got, step(made, 2)] == expected


@row("an unknown or misspelt key (ignored in DeepSpeed)", "keys of the configuration")
def keys(folder: Path) -> None:
    import deepspeed

    wrong = config(gradient_cliping=1.0)
    refused(lambda: deepspeed.initialize(model=model(), config=wrong), ConfigError, "gradient_cliping", "gradient_clipping")


@row("a name of `deepspeed` that is not here")
def names(folder: Path) -> None:
    import deepspeed

    refused(lambda: deepspeed.no_such_name, AttributeError, "deepspeed.no_such_name")
    refused(lambda: importlib.import_module("deepspeed.no_such"), ModuleNotFoundError, "deepspeed.no_such")


@row("`fully_shard(model)`", "optimizer made after `fully_shard`", "`reshard_after_forward=False`")
def like_fsdp(folder: Path) -> None:
    import zeroengine

    for stage in (3, 2):
        net = model()
        own = torch.optim.AdamW(net.parameters(), lr=0.01)
        bare = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        made, *_ = zeroengine.initialize(model=net, optimizer=own, config=bare)
        step(made)
        assert hasattr(net[0].weight, "ds_id") == (stage == 3)
        made.destroy()


@row("`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`", "`MixedPrecisionPolicy(reduce_dtype=…)`")
def precision(folder: Path) -> None:
    from zeroengine.utils import safe_get_full_fp32_param

    with engine(bf16={"enabled": True}) as made:
        step(made)
        fp32 = safe_get_full_fp32_param(made.module[0].weight)
        assert made.module[0].weight.dtype is torch.bfloat16 and fp32.dtype is torch.float32
        assert not torch.equal(fp32, fp32.bfloat16().float())  # masters of their own
        made.reset_traffic()
        step(made)
        wide = sum(made.traffic().values())
    with engine(bf16={"enabled": True}, communication_data_type="bf16") as made:
        step(made)
        made.reset_traffic()
        step(made)
        assert sum(made.traffic().values()) < wide


@row("HSDP, a mesh of (replicate, shard)")
def hybrid(folder: Path) -> None:
    with engine(mesh={"dp_replicate": 2, "dp_shard": 1}) as made:
        step(made)
        assert made.mesh.shard_params.size == 1 and made.mesh.data_parallel_size == 2


@row("`clip_grad_norm_(model.parameters(), c)`")
def clipping(folder: Path) -> None:
    with engine(gradient_clipping=1e-3) as made:
        step(made)
        assert made.was_step_clipped()
        made.backward(loss_of(made))
        refused(lambda: nn.utils.clip_grad_norm_(made.module.parameters(), 1.0), MovedGradientError, "clip")
        made.step()


@row("meta device and `to_empty`")
def meta(folder: Path) -> None:
    from zeroengine.zero import materialize

    values = model().state_dict()
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with engine(net=materialize(net, values)) as made:
        assert all(torch.equal(a, b) for a, b in zip(whole(made), values.values(), strict=True))


@row("`generate()` at stage 3")
def gathered_once(folder: Path) -> None:
    import deepspeed
    from transformers import LlamaForCausalLM

    from tests.integrations.tiny import model_config

    net = LlamaForCausalLM(model_config())
    with engine(net=net) as made:
        prompt = torch.tensor([[3, 4, 5]])
        made.reset_traffic()
        one = net.generate(prompt, max_length=20, do_sample=False, synced_gpus=True)
        each_token = sum(made.traffic().values())
        made.reset_traffic()
        with deepspeed.zero.GatheredParameters(net.parameters()):
            length = 20 if made.global_rank else 12  # no layer waits for the other rank
            other = net.generate(prompt, max_length=length, do_sample=False, synced_gpus=False)
        once = sum(made.traffic().values())
        assert torch.equal(one[:, :12], other[:, :12]) and once * 5 < each_token
    made = None


@row("`UlyssesSPAttentionHF.register_with_transformers`, `UlyssesSPDataLoaderAdapter`")
def ulysses_script(folder: Path) -> None:
    """The loop of DeepSpeed's tutorial: each rank has its part of a sequence, and the script joins their losses."""
    import deepspeed
    import torch.distributed.nn.functional as joined
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups
    from transformers import LlamaForCausalLM

    from tests.integrations.tiny import Sentences, model_config

    torch.manual_seed(0)
    net, alone = LlamaForCausalLM(model_config()), LlamaForCausalLM(model_config())
    alone.load_state_dict(net.state_dict())
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=net, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
    )
    made, *_ = deepspeed.initialize(
        model=net, mpu=mpu, config=config(train_micro_batch_size_per_gpu=1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    )
    assert mpu.get_sequence_parallel_world_size() == made.mesh.degrees.cp == 2
    group = groups._get_sequence_parallel_group()
    mine = torch.utils.data.DataLoader(Sentences(2, seed=made.global_rank))
    loader = UlyssesSPDataLoaderAdapter(mine, sp_rank=mpu.get_sequence_parallel_rank(), sp_group=group, sp_world_size=2, device=made.device)
    assert len(loader) == 4
    for batch in loader:
        local = net.config.vocab_size, batch["shift_labels"]
        assert local[1].shape == (1, 6)
        logits = made(**batch).logits
        loss = net.loss_function(logits=logits, labels=None, shift_labels=local[1], vocab_size=local[0])
        losses, counts = (torch.stack(list(joined.all_gather(t, group=group))) for t in (loss, (local[1] != -100).sum()))
        loss = torch.where(counts > 0, losses * counts, 0.0).sum() / counts.sum()
        made.backward(loss)
        made.step()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for sample in range(2):
        for rank in range(2):
            alone(**{k: v[None] for k, v in Sentences(2, seed=rank)[sample].items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole(made), alone.parameters(), strict=True))
    made.destroy()


def run(rank: int, world: int, folder: str) -> dict[str, str]:
    """The outcome of every check, "" where it holds."""
    import traceback

    stand_in()
    from zeroengine.comm import init_distributed

    init_distributed(verbose=False)
    outcomes: dict[str, str] = {}
    for check in dict.fromkeys(CHECKS.values()):
        place = Path(folder) / check.__name__
        place.mkdir(exist_ok=True)
        try:
            check(place)
            outcomes[check.__name__] = ""
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
    return outcomes
