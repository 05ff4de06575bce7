"""What the ranks of the monitors' tests run: several engines in one launch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from tests.engine.models import TinyLM, config, tokens

STEPS, ACCUMULATION = 5, 2


class Heard(logging.Handler):
    """Lines of the package's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-3}}, gradient_accumulation_steps=ACCUMULATION, **more)


def train(engine: Any, rank: int, steps: int = STEPS, start: int = 0) -> list[float]:
    """Mean loss of this rank in each step."""
    losses = []
    for step in range(start, start + steps):
        total = 0.0
        for micro in range(ACCUMULATION):
            loss = engine(*tokens(step, micro, rank))
            engine.backward(loss)
            total += float(loss.detach()) / ACCUMULATION
            engine.step()
        losses.append(total)
    return losses


def make(stage: int, **more: Any) -> Any:
    import zeroengine

    torch.manual_seed(0)
    return zeroengine.initialize(model=TinyLM(tied=False), config=settings(stage, **more))[0]


def everything(folder: Path, stage: int) -> dict[str, Any]:
    """All that writes, into `folder`."""
    files = {"enabled": True, "output_path": str(folder)}
    return {
        "tensorboard": {**files, "job_name": "board"},
        "csv_monitor": {**files, "job_name": "csv"},
        "jsonl_monitor": {**files, "job_name": "lines"},
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "steps_per_print": 2,
        "gradient_clipping": 1.0,
        "comms_logger": {"enabled": True, "debug": stage == 3},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(folder / "flops.txt"), "peak_tflops": 0.001},
        "torch_profiler": {"enabled": True, "start_step": 4, "output_path": str(folder / "trace")},
        "monitor": {"run_dir": str(folder / "run"), "timeline_step": 3},
    }


def observed(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Every stage with all monitors on: what they found, and whether training is the same without them."""
    found: dict[str, Any] = {}
    heard = Heard()
    logging.getLogger("zeroengine").addHandler(heard)
    logging.getLogger("zeroengine").setLevel(logging.INFO)
    for stage in (0, 1, 2, 3):
        here = Path(folder) / f"stage{stage}"
        plain = make(stage, gradient_clipping=1.0)
        losses = train(plain, rank)
        hooks = _hooks(plain)
        unheard = [c.name for c in plain.mesh.fabric.communicators if getattr(c, "listeners", ())]
        plain.destroy()
        heard.lines.clear()
        engine = make(stage, **everything(here, stage))
        same = train(engine, rank) == losses
        left = _hooks(engine)
        profile = next(o for o in engine.watch.observers if type(o).__name__ == "FlopsProfiler").result
        engine.monitor.write_events([("Mine/value", 2.5, engine.global_samples)])
        report = engine.report()
        found[str(stage)] = {
            "same": same, "losses": losses, "hooks": hooks, "hooks left": left, "unheard": unheard,
            "summary": engine.log_summary(show_straggler=True), "report": json.loads(report.json()), "text": report.text(),
            "page": report.html(), "lines": list(heard.lines), "enabled": engine.monitor.enabled, "total": vars(profile.total),
            "mfu": profile.mfu, "norm": engine.get_global_grad_norm(), "rates": engine.get_lr(), "samples": engine.global_samples,
            "planned": engine.planned_memory(), "planned traffic": engine.planned_traffic(),
        }  # fmt: skip
        engine.destroy()
        found[str(stage)]["after"] = [type(o).__name__ for o in engine.watch.observers]
    found["reset"] = _live_report(rank)
    found["profiled"] = _profiled(rank, Path(folder) / "by hand")
    return found


def _hooks(engine: Any) -> int:
    """Forward hooks on all modules."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())


def _live_report(rank: int) -> dict[str, Any]:
    """Without any observer: counters and layouts."""
    engine = make(1)
    train(engine, rank, 2)
    engine.reset_traffic()
    train(engine, rank, 3, 2)
    told = json.loads(engine.report().json())
    planned = engine.planned_traffic()
    engine.destroy()
    return {"report": told, "planned": planned}


def _profiled(rank: int, folder: Path) -> dict[str, Any]:
    engine = make(3)
    train(engine, rank, 1)
    with engine.profile(folder, with_stack=False):
        train(engine, rank, 1, 1)
    left = [*engine.watch.observers, *(c.name for c in engine.mesh.fabric.communicators if getattr(c, "listeners", ()))]
    engine.destroy()
    return {"names": _names(folder / f"rank-{rank}.json"), "left": [str(x) for x in left]}


def _names(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if e.get("cat") == "user_annotation"})


def pipelined(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A pipeline of two stages with experts in both, with monitors."""
    from torch import nn

    import zeroengine
    from zeroengine.moe import MoE
    from zeroengine.pipe import LayerSpec, PipelineModule

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.moe = MoE(8, nn.Linear(8, 8), num_experts=4, k=1, capacity_factor=4.0, eval_capacity_factor=4.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.moe(self.up(x))[0]

    zeroengine.init_distributed(verbose=False)
    torch.manual_seed(0)
    zeroengine.init_distributed(verbose=False)
    model = PipelineModule([LayerSpec(Block) for _ in range(2)], num_stages=2, loss_fn=nn.MSELoss())
    files = {"enabled": True, "output_path": folder}
    engine = zeroengine.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "steps_per_print": None,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "wall_clock_breakdown": True,
            "jsonl_monitor": {**files, "job_name": "pipe"}, "monitor": {"run_dir": f"{folder}/pipe run"},
            "comms_logger": {"enabled": True},
        },
    )[0]  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    data = iter([(torch.randn(2, 5, 8, generator=generator), torch.randn(2, 5, 8, generator=generator)) for _ in range(12)])
    losses = [float(engine.train_batch(data)) for _ in range(4)]
    report = engine.report()
    return {"losses": losses, "report": json.loads(report.json()), "page": report.html(), "summary": engine.log_summary()}
