"""The job of a process in `benchmarks.moe`: trains one system's mixture of experts, and times and weighs every turn."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import memory
from benchmarks.errors import Unavailable


class Expert(nn.Module):
    """A feed-forward network, [n, hidden] to the same."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers of `layer` with residuals, and a regression on a fixed target."""

    def __init__(self, layers: list[nn.Module], hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        routers = x.new_zeros(())
        for layer, norm in zip(self.layers, self.norms, strict=True):
            out, loss, _ = layer(norm(x))
            x, routers = x + out, routers + loss
        return F.mse_loss(x, y) + 0.01 * routers


class MoeJob:
    """`system`: "zeroengine" (a bank of experts), "zeroengine-list" (the same modules as DeepSpeed) or "deepspeed"."""

    def __init__(self, system: str, shape: dict[str, Any]):
        self.shape, self.rank, self.steps = shape, int(os.environ["RANK"]), 0
        torch.set_num_threads(shape["threads"])
        torch.manual_seed(0)
        build = self._deepspeed if system == "deepspeed" else self._ours
        self.prepare(system)
        gc.collect()
        self.baseline = memory.resident_bytes() or 0
        self.engine = build(system)
        self.planned: dict[str, int] | None = None if system == "deepspeed" else self.engine.planned_memory()

    def prepare(self, system: str) -> None:
        """Imports all that the system will use and connects, so that neither is in the growth that is measured."""
        if system != "deepspeed":
            import zeroengine

            _ = zeroengine.initialize, zeroengine.moe.MoE  # names resolve on first use
            zeroengine.init_distributed("gloo")
            return
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # its launcher sets this
        if find_spec("deepspeed") is None:
            raise Unavailable("DeepSpeed is not installed (see --deepspeed-python)")
        import_module("deepspeed").init_distributed(dist_backend="gloo")

    def _options(self) -> dict[str, Any]:
        s = self.shape
        drops = s["capacity"] > 0
        return {
            "num_experts": s["experts"], "ep_size": s["nproc"], "k": s["k"], "capacity_factor": s["capacity"] if drops else 1.0,
            "min_capacity": 1, "drop_tokens": drops, "use_rts": False,
        }  # fmt: skip

    def _config(self, stage: int) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }  # fmt: skip

    def _ours(self, system: str) -> Any:
        import zeroengine
        from zeroengine.moe import ExpertBank, MoE

        s = self.shape
        made: list[nn.Module] = []
        for _ in range(s["layers"]):
            expert: Any = Expert(s["hidden"], s["intermediate"])
            if system == "zeroengine":
                expert = ExpertBank(s["experts"], s["hidden"], s["intermediate"], "gelu", gated=False, bias=True)
            made.append(MoE(s["hidden"], expert, **self._options()))
        config = {**self._config(s["stage"]), "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
        return zeroengine.initialize(model=Stack(made, s["hidden"]), config=config)[0]

    def _deepspeed(self, system: str) -> Any:
        s = self.shape
        deepspeed = import_module("deepspeed")
        layer = import_module("deepspeed.moe.layer").MoE
        made = [
            layer(hidden_size=s["hidden"], expert=Expert(s["hidden"], s["intermediate"]), **self._options()) for _ in range(s["layers"])
        ]
        model = Stack(made, s["hidden"])
        split = import_module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
        groups = split({"params": list(model.parameters()), "name": "all"})
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        config = {**self._config(s["stage"]), "zero_allow_untested_optimizer": True}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def ready(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "planned": self.planned}

    def _held(self, kinds: Iterable[str]) -> int:
        """Bytes that the engine holds between steps, of the kinds that it plans."""
        held = self.engine.memory_report()
        return sum(held[kind] for kind in kinds)

    def turn(self, steps: int) -> dict[str, Any]:
        seconds, losses = [], []
        resets = memory.reset_peak()
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.steps + self.rank)
            x, y = (torch.randn(self.shape["tokens"], self.shape["hidden"], generator=generator) for _ in range(2))
            begin = time.perf_counter()
            loss = self.engine(x, y)
            self.engine.backward(loss)
            self.engine.step()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
            self.steps += 1
        return {
            "seconds": seconds, "losses": losses, "resident": (memory.resident_bytes() or 0) - self.baseline,
            "peak": (memory.peak_bytes() or 0) - self.baseline if resets else None,
            "held": None if self.planned is None else self._held(self.planned),
        }  # fmt: skip
