"""The jobs of a process in `benchmarks.pipeline`: one trains a system's pipeline, one runs schedules over layers that sleep."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.errors import Unavailable
from benchmarks.model import Block, step_batches
from benchmarks.settings import Settings

Batches = list[tuple[Tensor, Tensor]]


# --- the model as a list of layers ------------------------------------------------------------------------------------


class Embed(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        self.tokens, self.positions = nn.Embedding(settings.vocab, settings.hidden), nn.Embedding(settings.sequence, settings.hidden)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))


class Layer(Block):
    """One block. Its values depend on its number only, not on where the model is cut."""

    def __init__(self, settings: Settings, number: int) -> None:
        torch.manual_seed(settings.seed + 1 + number)
        super().__init__(settings.hidden, settings.heads)


class Head(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(settings.seed + 1 + settings.layers)
        self.norm, self.out = nn.LayerNorm(settings.hidden), nn.Linear(settings.hidden, settings.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def layer_specs(spec: Any, settings: Settings) -> list[Any]:
    """The layers as `spec`s of either engine."""
    blocks = [spec(Layer, settings, i) for i in range(settings.layers)]
    return [spec(Embed, settings), *blocks, spec(Head, settings)]


def stage_module(settings: Settings, stage: int, stages: int) -> nn.Module:
    """The layers of one of `stages` equal stages, as one module."""
    each = settings.layers // stages
    layers: list[nn.Module] = [Layer(settings, i) for i in range(stage * each, (stage + 1) * each)]
    first, last = [Embed(settings)] * (stage == 0), [Head(settings)] * (stage == stages - 1)
    return nn.Sequential(*first, *layers, *last)


# --- systems ------------------------------------------------------------------------------------------------------------


class Trainer(Protocol):
    def step(self, batches: Batches) -> float | None:
        """One optimizer step; the mean loss, on ranks that know it."""
        ...

    def idle(self) -> tuple[float, float] | None:
        """Share of time without computation in the last step, measured and computed from its measured times; None where the
        system does not tell."""
        ...


class Ours:
    def __init__(self, schedule: str, settings: Settings) -> None:
        import zeroengine
        from zeroengine.pipe import LayerSpec, PipelineModule

        zeroengine.init_distributed("gloo", verbose=False)
        module = PipelineModule(
            layer_specs(LayerSpec, settings),
            settings.nproc,
            cross_entropy,
            schedule=schedule,
            partition_method="type:Layer",
            seed_layers=False,
        )
        options = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        config = {
            "train_micro_batch_size_per_gpu": settings.micro_batch, "gradient_accumulation_steps": settings.accumulation,
            "optimizer": {"type": "AdamW", "params": options}, "zero_optimization": {"stage": 0}, "steps_per_print": None,
        }  # fmt: skip
        self.engine: Any = zeroengine.initialize(model=module, config=config)[0]

    def step(self, batches: Batches) -> float | None:
        return float(self.engine.train_batch(iter(batches)))

    def idle(self) -> tuple[float, float] | None:
        measured = self.engine.timeline()
        return measured.bubble, computed_bubble(measured)


class Torch:
    """`torch.distributed.pipelining`; the stages of a rank lie as its schedule wants them."""

    def __init__(self, schedule: str, settings: Settings) -> None:
        from torch.distributed import pipelining

        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), settings.nproc
        kind, chunks = {
            "1f1b": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", 2),
            "zero-bubble": ("ScheduleInterleavedZeroBubble", 2), "zb-v": ("ScheduleZBVZeroBubble", 2),
        }[schedule]  # fmt: skip
        total = ranks * chunks
        numbers = [rank, total - 1 - rank][:chunks] if schedule == "zb-v" else list(range(rank, total, ranks))
        self.modules = [stage_module(settings, s, total) for s in numbers]
        stages = [
            pipelining.PipelineStage(m, s, total, torch.device("cpu")) for m, s in zip(self.modules, numbers, strict=True)
        ]  # fmt: skip
        cls: Any = getattr(pipelining, kind)
        self.schedule = cls(stages[0] if chunks == 1 else stages, settings.accumulation, loss_fn=cross_entropy)
        self.first, self.last = 0 in numbers, total - 1 in numbers
        params = [p for m in self.modules for p in m.parameters()]
        self.optimizer = torch.optim.AdamW(params, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)

    def step(self, batches: Batches) -> float | None:
        losses: list[Tensor] = []
        inputs = (torch.cat([x for x, _ in batches]),) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=torch.cat([y for _, y in batches]), losses=losses)
        else:
            self.schedule.step(*inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()  # the other systems agree on norm or loss here
        return float(torch.stack(losses).mean()) if losses else None

    def idle(self) -> tuple[float, float] | None:
        return None


class DeepSpeed:
    """DeepSpeed's `PipelineEngine`, which knows 1F1B."""

    def __init__(self, schedule: str, settings: Settings) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # its launcher sets this
        if find_spec("deepspeed") is None:
            raise Unavailable("DeepSpeed is not installed (see --deepspeed-python)")
        deepspeed, pipe = import_module("deepspeed"), import_module("deepspeed.pipe")
        deepspeed.init_distributed(dist_backend="gloo")
        module = pipe.PipelineModule(
            layer_specs(pipe.LayerSpec, settings), num_stages=settings.nproc, loss_fn=cross_entropy, partition_method="type:Layer"
        )
        optimizer = torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad], lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        config = {
            "train_micro_batch_size_per_gpu": settings.micro_batch, "gradient_accumulation_steps": settings.accumulation,
            "gradient_clipping": 0.0,  # it clips to 1.0 unless told, and each stage by the norm of one; the others do not clip
            "zero_optimization": {"stage": 0}, "steps_per_print": 10**9,
        }  # fmt: skip
        self.engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]

    def step(self, batches: Batches) -> float | None:
        return float(self.engine.train_batch(iter(batches)))

    def idle(self) -> tuple[float, float] | None:
        return None


_SYSTEMS: dict[str, Any] = {"zeroengine": Ours, "torch": Torch, "deepspeed": DeepSpeed}


class PipelineJob:
    """Trains the system `name`, as "zeroengine-1f1b"; every process reads the same batches."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.settings = Settings(**settings)
        torch.set_num_threads(self.settings.threads)
        system, _, schedule = name.partition("-")
        self.trainer: Trainer = _SYSTEMS[system](schedule, self.settings)
        self.steps = 0

    def ready(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def turn(self, steps: int) -> dict[str, Any]:
        seconds, losses = [], []
        for _ in range(steps):
            batches = step_batches(self.settings, self.steps, 0)
            begin = time.perf_counter()
            losses.append(self.trainer.step(batches))
            seconds.append(time.perf_counter() - begin)
            self.steps += 1
        return {"seconds": seconds, "losses": losses, "idle": self.trainer.idle()}


# --- schedules over layers that sleep ---------------------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    """x, after `forward` seconds; its gradient after `backward` seconds. A function of one input: one of several would make all its
    gradients whenever one is asked for, so that a backward in two parts would take twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        time.sleep(forward)
        ctx.seconds = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepingLayer(nn.Module):
    """x * weight, after `seconds`; each of the two gradients takes as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, self.seconds, self.seconds) * _Sleep.apply(self.weight, 0.0, self.seconds)
        return out


class BubbleJob:
    """Runs schedules on stages that sleep, so that ranks do not need a core each."""

    def __init__(self, ranks: int) -> None:
        import zeroengine

        torch.set_num_threads(1)
        zeroengine.init_distributed("gloo", verbose=False)
        self.ranks = ranks

    def ready(self) -> dict[str, Any]:
        return {"torch": torch.__version__}

    def turn(self, schedule: str, micro_batches: int, seconds: float, steps: int) -> dict[str, Any]:
        """`seconds`: of a rank's forward of one micro-batch. Returns shares of idle time."""
        import zeroengine
        from zeroengine.pipe import SCHEDULES, PipelineModule

        stages = self.ranks * SCHEDULES[schedule].default_chunks
        layers = [SleepingLayer(seconds * self.ranks / stages) for _ in range(stages)]
        module = PipelineModule(layers, self.ranks, lambda x, y: (x - y).square().mean(), schedule=schedule, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches, "steps_per_print": None,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        }  # fmt: skip
        engine: Any = zeroengine.initialize(model=module, config=config)[0]
        measured, computed, spans = [], [], 0
        for step in range(steps + 1):
            x = torch.ones(1, 4, requires_grad=True)
            engine.train_batch(iter([(x, torch.zeros(1, 4)) for _ in range(micro_batches)]))
            timeline = engine.timeline()
            if step:  # the first one exchanges layouts
                measured.append(timeline.bubble)
                computed.append(computed_bubble(timeline, equal=True))
                spans = len(timeline.spans)
        engine.destroy()
        return {"measured": measured, "computed": computed, "spans": spans}


def computed_bubble(measured: Any, equal: bool = False) -> float:
    """Idle share of the same schedule with messages for nothing, and with the mean measured time of each kind of action in each
    stage, or with `equal` times."""
    from zeroengine.pipe import Costs, simulate

    if equal:
        return float(simulate(measured.schedule, Costs()).bubble)
    times: dict[Any, list[float]] = defaultdict(list)
    for span in measured.spans:
        times[span.action.kind, span.action.stage].append(span.end - span.start)

    class Measured(Costs):
        def time(self, action: Any) -> float:
            found = times[action.kind, action.stage]
            return sum(found) / len(found)

    return float(simulate(measured.schedule, Measured()).bubble)
