"""What a run needs comes back: random states, counters, schedules, buffers of a rank."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.engines import Awkward, build, fill, held, train, truth, wrong
from tests.checkpoint.scenarios import run_scenarios
from tests.checkpoint.test_trouble import _log
from tests.engine.models import TinyLM, config, tokens
from tests.ranks import run_ranks


class Noisy(nn.Module):
    """Draws from every generator, and keeps running statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM(blocks=1)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        import numpy

        noise = random.random() + float(numpy.random.rand()) + torch.rand(())
        extra = self.norm(x.float() + noise)
        self.norm.running_mean.requires_grad_(False)
        return self.inner(x, y) * (1 + 0.1 * noise) + 0.01 * extra.square().mean() * self.norm.running_mean.mean()


def _noisy(stage: int, seed: int = 1) -> Any:
    import zeroengine

    torch.manual_seed(seed)
    engine, *_ = zeroengine.initialize(
        model=Noisy(),
        config=config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    )
    return engine


def _run_as_if_not_stopped(d: Path, rank: int) -> bool:
    """3 + 3 steps against 6, with all generators, a scheduler of torch's and statistics of each rank's own."""
    import numpy

    same = []
    for stage in (0, 2, 3):
        random.seed(rank)
        numpy.random.seed(rank)
        engine = _noisy(stage)
        train(engine, 0, 3, rank)
        engine.save_checkpoint(d / str(stage), client_state={"note": (stage, "x")})
        losses = train(engine, 3, 3, rank)
        expected = (losses, engine.get_lr(), random.random(), float(numpy.random.rand()), torch.rand(()).item())
        state = {k: [p.data.clone() for p in v] for k, v in held(engine).items()}
        engine.destroy()
        engine = _noisy(stage, seed=5)
        path, client = engine.load_checkpoint(d / str(stage))
        again = (train(engine, 3, 3, rank), engine.get_lr(), random.random(), float(numpy.random.rand()), torch.rand(()).item())
        after = {k: [p.data for p in v] for k, v in held(engine).items()}
        same.append(again == expected and client == {"note": (stage, "x")} and str(path).endswith("global_step3"))
        same.append(all(torch.equal(a, b) for k in state for a, b in zip(state[k], after[k], strict=True)))
        same.append(engine.optimizer.param_groups[0] is engine.lr_scheduler.optimizer.param_groups[0])
        engine.destroy()
    return all(same)


def _frozen_excluded(d: Path, rank: int) -> list[Any]:
    """The checkpoint lacks the frozen layer; loading keeps the values of the model, and says so."""
    found: list[Any] = []
    for stage in (1, 3):
        engine = build(stage)
        fill(engine)
        engine.save_checkpoint(d / f"{stage}", exclude_frozen_parameters=True)
        engine.save_16bit_model(d / f"{stage}", "w.bin", exclude_frozen_parameters=True)
        engine.destroy()
        engine = build(stage, seed=3)
        before = (engine.full_state_dict() or {}).get("frozen.weight")
        engine.load_checkpoint(d / f"{stage}")
        after = (engine.full_state_dict() or {}).get("frozen.weight")
        found.append(rank != 0 or torch.equal(before, after))
        found.append(set(wrong(engine)) <= {"model.frozen.weight", "gathered frozen.weight"})
        found.append("frozen.weight" not in torch.load(d / f"{stage}" / "w.bin", weights_only=True))
        engine.destroy()
    return found


def _weights_without_optimizer(d: Path, rank: int) -> list[Any]:
    """Masters come exactly; the optimizer stays as it was, and a step of rate 0 does not undo the load."""
    engine = build(2, "bf16")
    fill(engine)
    engine.global_steps = 9
    engine.save_checkpoint(d)
    engine.destroy()
    found: list[Any] = []
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        engine = build(3, "bf16", seed=3)
        engine.load_checkpoint(d, **options)
        found.append(engine.global_steps == (0 if "load_module_only" in options else 9))
        found.append(not engine.optimizer.state)
        engine.optimizer.param_groups[0].update(lr=0.0)
        train(engine, 0, 1, rank)
        found.append(not [key for key in wrong(engine) if not key.startswith(("optim.", "step"))])
        engine.destroy()
    return found


def _before_the_first_step(d: Path, rank: int) -> list[Any]:
    engine = build(1)
    engine.save_checkpoint(d)
    train(engine, 0, 2, rank)
    engine.load_checkpoint(d)
    return [not engine.optimizer.state, engine.global_steps == 0, train(engine, 0, 1, rank)[0] > 0, engine.destroy() is None]


def _numbers_in_the_state(d: Path, rank: int) -> list[Any]:
    """Optimizers that count in Python numbers, or keep nothing for some parameters, come back too."""
    import zeroengine

    class Counting(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["count"] = self.state[p].get("count", 0) + 1

    found = []
    for stage in (0, 3):
        engines = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            engines.append(zeroengine.initialize(
                model=TinyLM(), optimizer=lambda groups: Counting(groups, lr=0.1, momentum=0.9), config=config(stage)
            )[0])  # fmt: skip
        train(engines[0], 0, 3, rank)
        engines[0].save_checkpoint(d / str(stage))
        engines[1].load_checkpoint(d / str(stage))
        found.append({s["count"] for s in engines[1].optimizer.state.values()} <= {3})
        found.append(train(engines[0], 3, 2, rank) == train(engines[1], 3, 2, rank))
        for engine in engines:
            engine.destroy()
    return found


def _loss_scale(d: Path, rank: int) -> list[Any]:
    engine = build(2, "fp16")
    engine.optimizer.scaler.update(True)
    engine.optimizer.scaler.update(True)
    engine.optimizer.skipped_steps = engine.global_steps = 4
    engine.save_checkpoint(d)
    scale = engine.loss_scale
    engine.destroy()
    engine = build(1, "fp16")
    other = engine.loss_scale
    engine.load_checkpoint(d)
    result = [engine.loss_scale == scale != other, engine.skipped_steps == 4]
    engine.destroy()
    return result


def _hybrid(d: Path, rank: int) -> list[Any]:
    """Replicas of a shard: each writes a half of it."""
    engine = build(3, mesh={"dp_replicate": 2})
    fill(engine)
    engine.save_checkpoint(d)
    written = sum(p.data.nbytes for p in _shares(engine))
    held_bytes = sum(p.data.nbytes for parts in held(engine).values() for p in parts)
    engine.destroy()
    engine = build(2, seed=4)
    engine.load_checkpoint(d)
    result = [not wrong(engine), written < 0.6 * held_bytes]
    engine.destroy()
    return result


def _shares(engine: Any) -> list[Any]:
    from zeroengine.engine import pieces as state

    share = state.Share(engine.mechanism.groups)
    groups = [
        state.model_pieces(engine.module, engine.mechanism, share=share),
        state.optimizer_pieces(engine.optimizer, share),
        state.master_pieces(engine.optimizer, share),
    ]
    return [p for group in groups for parts in group.values() for p in parts]


def _every_byte_once(d: Path, rank: int) -> list[Any]:
    """At every stage the two ranks write about a half each, and together no more than there is."""
    found = []
    for stage in (0, 1, 2, 3):
        engine = build(stage)
        fill(engine)
        mine = sum(p.data.nbytes for p in _shares(engine))
        total = engine.mechanism.groups.control.exchange(torch.tensor([mine]), "bytes").flatten().tolist()
        parameters = sum(p.numel() for p in engine.module.parameters())
        trainable = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
        exact = 4 * (parameters + 2 * trainable) + 8 + 24 + 4 * len([p for p in engine.module.parameters() if p.requires_grad])
        found.append(sum(total) == exact and max(total) < 0.6 * exact)
        engine.destroy()
    return found


def _an_engine_that_only_evaluates(d: Path, rank: int) -> list[Any]:
    """It has no optimizer: it takes the weights, in the best precision that there is, and the counters."""
    import zeroengine

    engine = build(2, "bf16")
    fill(engine)
    engine.global_steps = 3
    engine.save_checkpoint(d)
    loss = engine(*tokens(0, 0, rank)).item()
    engine.destroy()
    found: list[Any] = []
    for stage, extra in ((0, {}), (3, {}), (3, {"bf16": {"enabled": True}})):
        settings = {k: v for k, v in config(stage, **extra).items() if k != "optimizer"}
        engine, *_ = zeroengine.initialize(model=Awkward(), config=settings)
        engine.load_checkpoint(d)
        whole = engine.full_state_dict()
        if whole is not None:
            right = truth("model.blocks.0.up.weight", (34, 17)).view(34, 17)
            found.append(torch.equal(whole["blocks.0.up.weight"], right.to(whole["blocks.0.up.weight"].dtype)))
        found.append(engine.global_steps == 3)
        found.append(not extra or engine(*tokens(0, 0, rank)).item() == loss)
        engine.destroy()
    return found


def _in_the_background(d: Path, rank: int) -> list[Any]:
    """Training goes on and changes everything; the checkpoint is of the moment of the call, also of state that the thread copies
    late. A second save waits."""
    found: list[Any] = []
    late: list[Any] = []

    def slow_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(0.02)
        late.append(target.copy_(source))

    for stage in (0, 3):
        engine = build(stage, "bf16")
        fill(engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zeroengine.checkpoint.background.copy_away", slow_copy)
            engine.save_checkpoint(d / str(stage), tag="a", blocking=False, keep_last=2)
            losses = train(engine, 0, 2, rank)
        found.append(bool(late))
        late.clear()
        for tag in ("b", "c", "d"):
            engine.save_checkpoint(d / str(stage), tag=tag, blocking=tag == "c", keep_last=2)
            if tag == "b":
                engine.wait_for_checkpoint()
                other = build(2, "bf16", seed=9)
                other.load_checkpoint(d / str(stage), tag="a")
                found.append(wrong(other) or True)
                other.destroy()
        engine.destroy()  # waits for "d"
        found.append(sorted(p.name for p in (d / str(stage)).iterdir()) == ["c", "d", "latest"])
        found.append((d / str(stage) / "latest").read_text() == "d")
        engine = build(stage, "bf16")
        fill(engine)
        found.append(losses == train(engine, 0, 2, rank))
        engine.destroy()
    return found


def _a_schedule_that_the_script_steps(d: Path, rank: int) -> list[Any]:
    """Registered, it comes back; unknown, a save says so, once."""
    import zeroengine

    def made() -> tuple[Any, Any]:
        torch.manual_seed(1)
        engine, *_ = zeroengine.initialize(model=TinyLM(blocks=1), config=config(2))
        return engine, torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda n: 1 / (1 + n))

    def rates(engine: Any, schedule: Any) -> list[float]:
        used = []
        for step in range(3):
            used += engine.get_lr()
            train(engine, step, 1, rank)
            schedule.step()
        return used

    engine, schedule = made()
    engine.register_for_checkpoint(schedule)
    with _log() as said:
        rates(engine, schedule)
        engine.save_checkpoint(d / "known")
    quiet = not any("a schedule moves the learning rates" in line for line in said)
    expected = rates(engine, schedule)
    engine.destroy()
    engine, schedule = made()
    engine.register_for_checkpoint(schedule)
    engine.load_checkpoint(d / "known")
    again = rates(engine, schedule)
    engine.destroy()
    engine, schedule = made()
    with _log() as said:
        engine.load_checkpoint(d / "known")
        engine.save_checkpoint(d / "unknown")
    told = [line for line in said if "register" in line]
    refused = False
    try:
        engine.register_for_checkpoint(3)
    except TypeError:
        refused = True
    engine.destroy()
    counted = len(told) == 2 and "1 registered objects, and 0 are registered" in told[0] and "not in the checkpoint" in told[1]
    return [quiet, again == expected, rank != 0 or counted or told, refused]


SCENARIOS = (
    _a_schedule_that_the_script_steps,
    _run_as_if_not_stopped, _frozen_excluded, _weights_without_optimizer, _before_the_first_step, _numbers_in_the_state,
    _loss_scale, _hybrid, _every_byte_once, _an_engine_that_only_evaluates, _in_the_background,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_scenarios, 2, str(tmp_path_factory.mktemp("engine")), SCENARIOS, timeout=240)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__.strip("_"))
def test_what_a_run_needs(outcomes: list[dict[str, Any]], scenario: Any) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(scenario.__name__, "not reached") == "", f"rank {rank}: {outcome.get(scenario.__name__)}"
