"""The systems that are compared: each makes a training step out of the same model, data and optimizer.

A name is `limit` (no communication at all), `ddp`, `fsdp2`, `deepspeed-S` or `zeroengine-S` with S a ZeRO stage; with `-cpu` or
`-nvme` after it the optimizer's state (at stage 3 with nvme the parameters, too) is offloaded there. All
keep fp32 weights, gradients and AdamW states unless --dtype bf16 is asked for: then matrix products and activations are
bf16 and the masters stay fp32, by whatever means the system has (autocast, a precision policy, a `bf16` section).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.errors import Unavailable
from benchmarks.settings import Settings

Batches = Sequence[tuple[Tensor, Tensor]]


class Trainer(Protocol):
    def step(self, batches: Batches) -> Tensor:
        """One optimizer step over the micro-batches; their mean loss on this rank, detached."""
        ...

    def traffic(self) -> dict[str, int] | None:
        """Bytes that this rank has sent so far, by kind, and `total`, that of parameters and gradients; None when the
        system does not count them."""
        ...

    def report(self) -> Any:
        """What the system itself says about memory and traffic; None when it says nothing."""
        ...


class System(Protocol):
    def prepare(self, settings: Settings) -> None:
        """Imports and connects. Comes before the memory baseline."""
        ...

    def build(self, model: nn.Module, settings: Settings) -> Trainer: ...


class _LoopTrainer:
    """A plain torch training loop; subclasses say how gradients wait for the last micro-batch."""

    def __init__(self, model: nn.Module, settings: Settings, *, autocast: bool):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
        self.autocast = autocast

    def hold(self, last: bool) -> Any:
        """Context of one forward and backward."""
        del last
        return nullcontext()

    def step(self, batches: Batches) -> Tensor:
        total = torch.zeros(())
        for i, (tokens, targets) in enumerate(batches):
            with self.hold(i == len(batches) - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.model(tokens, targets) / len(batches)
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()  # here and not before the next step: memory at rest is without gradients
        return total

    def traffic(self) -> dict[str, int] | None:
        return None

    def report(self) -> Any:
        return None


class _DdpTrainer(_LoopTrainer):
    def hold(self, last: bool) -> Any:
        return nullcontext() if last else self.model.no_sync()  # type: ignore[operator]


class _FsdpTrainer(_LoopTrainer):
    def hold(self, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()


class _EngineTrainer:
    """DeepSpeed's training interface, which zeroengine shares."""

    def __init__(self, engine: Any):
        self.engine = engine

    def step(self, batches: Batches) -> Tensor:
        total = torch.zeros(())
        for tokens, targets in batches:
            loss = self.engine(tokens, targets)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(batches)
        return total

    def traffic(self) -> dict[str, int] | None:
        return None

    def report(self) -> Any:
        return None


class _ZeroEngineTrainer(_EngineTrainer):
    def traffic(self) -> dict[str, int] | None:
        sent: dict[str, int] = self.engine.traffic()
        return sent

    def report(self) -> Any:
        return {
            "memory": self.engine.memory_report(),
            "planned_memory": self.engine.planned_memory(),
            "planned_traffic": self.engine.planned_traffic(),
        }


class Limit:
    """As many processes as the others use, each by itself: what a step costs when communication is free."""

    def prepare(self, settings: Settings) -> None:
        return

    def build(self, model: nn.Module, settings: Settings) -> Trainer:
        return _LoopTrainer(model, settings, autocast=settings.dtype == "bf16")


class Ddp:
    def prepare(self, settings: Settings) -> None:
        dist.init_process_group("gloo")

    def build(self, model: nn.Module, settings: Settings) -> Trainer:
        wrapped = nn.parallel.DistributedDataParallel(model)
        return _DdpTrainer(wrapped, settings, autocast=settings.dtype == "bf16")


class Fsdp2:
    """`fully_shard` on every block, then on the whole."""

    def prepare(self, settings: Settings) -> None:
        dist.init_process_group("gloo")

    def build(self, model: nn.Module, settings: Settings) -> Trainer:
        mesh = init_device_mesh("cpu", (settings.nproc,))
        precision = MixedPrecisionPolicy()
        if settings.dtype == "bf16":
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        return _FsdpTrainer(model, settings, autocast=False)


def _engine_config(settings: Settings, stage: int, place: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if place:
        where = {"device": place, **({"nvme_path": settings.folder} if place == "nvme" else {})}
        zero["offload_optimizer"] = where
        if stage == 3:
            zero["offload_param"] = where
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": 0.0,  # DeepSpeed clips to 1.0 unless told; the torch loops do not clip
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": settings.learning_rate, "weight_decay": settings.weight_decay},
        },
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bf16"},
    }


class DeepSpeed:
    """DeepSpeed on CPU over Gloo, with its defaults but for the optimizer (`Settings.deepspeed_adam`). With offload it takes
    its own CPU Adam, which it compiles on first use."""

    def __init__(self, stage: int, place: str = ""):
        self.stage = stage
        self.place = place

    def prepare(self, settings: Settings) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_SIZE"] = str(settings.nproc)  # its launcher sets this; its shared-memory operation needs it
        if find_spec("deepspeed") is None:
            raise Unavailable("DeepSpeed is not installed (see --deepspeed-python)")
        deepspeed = import_module("deepspeed")
        deepspeed.init_distributed(dist_backend="gloo")

    def build(self, model: nn.Module, settings: Settings) -> Trainer:
        config = _engine_config(settings, self.stage, self.place)
        optimizer = None
        if self.place:
            self._check_offload()
        elif settings.deepspeed_adam == "cpu":
            params = config.pop("optimizer")["params"]
            adam = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
            optimizer = adam(model.parameters(), adamw_mode=True, **params)
        else:
            config["optimizer"]["params"].update(torch_adam=True, fused=settings.deepspeed_adam == "fused")
        engine, *_ = import_module("deepspeed").initialize(model=model, optimizer=optimizer, config=config)
        return _EngineTrainer(engine)

    def _check_offload(self) -> None:
        """Its own operations are compiled on first use, and the reason why one cannot be is far from the error."""
        builders = import_module("deepspeed.ops.op_builder")
        wanted = [builders.CPUAdamBuilder()] + ([builders.AsyncIOBuilder()] if self.place == "nvme" else [])
        for builder in wanted:
            if not builder.is_compatible(verbose=False):
                raise Unavailable(f"DeepSpeed's operation {builder.NAME} cannot be built here (for nvme it needs libaio)")


class ZeroEngine:
    def __init__(self, stage: int, place: str = ""):
        self.stage = stage
        self.place = place

    def prepare(self, settings: Settings) -> None:
        import zeroengine

        _ = zeroengine.initialize  # names resolve on first use
        zeroengine.init_distributed("gloo")

    def build(self, model: nn.Module, settings: Settings) -> Trainer:
        import zeroengine

        engine, *_ = zeroengine.initialize(model=model, config=_engine_config(settings, self.stage, self.place))
        return _ZeroEngineTrainer(engine)


def make_system(name: str) -> System:
    family, _, rest = name.partition("-")
    stage, _, place = rest.partition("-")
    if family == "deepspeed":
        return DeepSpeed(int(stage), place)
    if family == "zeroengine":
        return ZeroEngine(int(stage), place)
    plain: dict[str, type[Limit] | type[Ddp] | type[Fsdp2]] = {"limit": Limit, "ddp": Ddp, "fsdp2": Fsdp2}
    return plain[family]()
