"""Rates against closed forms and numbers worked out by hand."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from zeroengine.config import Config
from zeroengine.errors import CheckpointError, ConfigError
from zeroengine.optim.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)


def _optimizer(rates: tuple[float, ...] = (0.1,), tensor: bool = False) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": torch.tensor(rate) if tensor else rate} for rate in rates]
    return torch.optim.AdamW(groups, betas=(0.85, 0.95))


def _used(schedule: Any, steps: int, group: int = 0) -> list[float]:
    """The rate that each of `steps` optimizer steps uses."""
    result = []
    for _ in range(steps):
        rate = float(schedule.optimizer.param_groups[group]["lr"])
        assert schedule.get_last_lr()[group] == schedule.get_lr()[group] == schedule.optimizer.param_groups[group]["lr"]
        result.append(rate)
        schedule.step()
    return result


def _log(n: int, steps: int) -> float:
    return math.log(n + 1) / math.log(steps)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # The first step and the step with index 0 after it both have the start of the warm-up.
        (lambda o: WarmupLR(o, 0.0, 1.0, 4, "linear"), [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]),
        (lambda o: WarmupLR(o, 1.0, 3.0, 4, "linear"), [1, 1, 1.5, 2, 2.5, 3, 3]),
        (lambda o: WarmupLR(o, 0.0, 1.0, 4), [0, 0, _log(1, 4), _log(2, 4), 1, 1]),
        (lambda o: WarmupLR(o, warmup_num_steps=2), [0, 0, 0.1, 0.1]),  # null: the group's own rate
        (lambda o: WarmupLR(o, 0.0, 1.0, 1), [0, 0, 1, 1]),  # 1 counts as 2
        (lambda o: WarmupLR(o, 0.0, 1.0, 1, "linear"), [0, 0, 0.5, 1]),
        (lambda o: WarmupLR(o, 0.0, 1.0, 0), [1, 1, 1]),  # 0 is none
        (lambda o: WarmupDecayLR(o, 6, 0.0, 1.0, 2, "linear"), [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        (lambda o: WarmupDecayLR(o, 6, 0.2, 1.0, 2, "linear"), [0.2, 0.2, 0.6, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (lambda o: WarmupDecayLR(o, 2, 0.0, 1.0, 4, "linear"), [0, 0, 0.25, 0.5, 0.75, 0, 0]),  # shorter than warm-up
        (lambda o: WarmupDecayLR(o, 4, 0.0, 1.0, 0), [1, 1, 0.75, 0.5, 0.25, 0, 0]),
        (lambda o: WarmupCosineLR(o, 6, 0.5, 2, 0.2, "linear"),
         [0.05, 0.05, 0.075, *(0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * k / 4)) / 2) for k in (1, 2, 3, 4)), 0.02]),
        (lambda o: WarmupCosineLR(o, 2, 0.0, 4, 0.5, "linear"), [0, 0, 0.025, 0.05, 0.075, 0.05, 0.05]),
        (lambda o: LRRangeTest(o, 0.5, 2, 3.0), [0.5, 1.25, 2.0, 2.75]),
        (lambda o: LRRangeTest(o, 0.5, 2, 3.0, True), [0.5, 0.5, 2.0, 2.0, 3.5]),
        (lambda o: OneCycle(o, 1.0, 5.0, cycle_first_step_size=4, cycle_second_step_size=2),
         [1, 2, 3, 4, 5, 3, 1, 1, 1]),
        (lambda o: OneCycle(o, 1.0, 5.0, cycle_first_step_size=4, cycle_first_stair_count=2),
         [1, 1, 3, 3, 5, 3, 3, 1, 1]),
        (lambda o: OneCycle(o, 1.0, 5.0, 1.0, 2, 1, decay_step_size=2), [1, 3, 5, 1, 1 / 1.5, 1 / 2, 1 / 2.5]),
    ],
)  # fmt: skip
def test_rates_used_by_each_step(make, expected: list[float]) -> None:
    assert _used(make(_optimizer()), len(expected)) == pytest.approx(expected, rel=1e-14, abs=1e-300)


def test_one_cycle_moves_the_first_beta_the_other_way() -> None:
    optimizer = _optimizer()
    schedule = OneCycle(optimizer, 1.0, 5.0, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.01)
    seen = []
    for _ in range(7):
        seen.append(optimizer.param_groups[0]["betas"])
        schedule.step()
    assert [beta for beta, _ in seen] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.01, 0.9 * 1.02])
    assert {second for _, second in seen} == {0.95}
    fixed = _optimizer()
    OneCycle(fixed, 1.0, 5.0, cycle_momentum=False).step()
    assert fixed.param_groups[0]["betas"] == (0.85, 0.95)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.7)
    OneCycle(plain, 1.0, 5.0).step()
    assert plain.param_groups[0]["momentum"] == 0.7


def test_groups_have_their_own_rates() -> None:
    optimizer = _optimizer((0.1, 0.2))
    assert _used(WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear"), 4, 1) == pytest.approx([0, 0, 0.1, 0.2])
    optimizer = _optimizer((0.1, 0.2))
    schedule = WarmupLR(optimizer, [0.0, 1.0], [2.0, 3.0], 2, "linear")
    assert _used(schedule, 3, 0) == [0, 0, 1] and _used(WarmupLR(optimizer, 0.0, [2.0, 4.0], 2), 3, 1) == [0, 0, 4]
    cosine = WarmupCosineLR(_optimizer((0.1, 0.2)), 4, 1.0, 0, 1.0)
    assert cosine.get_lr() == [0.1, 0.2]
    with pytest.raises(ConfigError, match="`warmup_max_lr` .*2: one for each"):
        WarmupLR(_optimizer((0.1, 0.2)), 0.0, [1.0])


def test_a_group_added_later() -> None:
    optimizer = _optimizer((0.1,))
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    for _ in range(4):
        schedule.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.3})
    schedule.step()
    assert schedule.get_last_lr() == [0.1, 0.3]


def test_tensor_rates_are_filled_in_place() -> None:
    optimizer = _optimizer((0.1,), tensor=True)
    rate = optimizer.param_groups[0]["lr"]
    schedule = WarmupLR(optimizer, 0.0, 1.0, 2)
    schedule.step(5)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 1.0


MAKERS = {
    "WarmupLR": lambda o: WarmupLR(o, 1e-5, None, 7),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 17, 1e-5, 0.1, 7),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 17, 0.1, 7),
    "LRRangeTest": lambda o: LRRangeTest(o, 1e-5, 3),
    "OneCycle": lambda o: OneCycle(o, 0.01, 0.1, 0.1, 5, 6, decay_step_size=2),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stop", [0, 1, 3, 8, 15])
def test_resume_is_exact(name: str, stop: int) -> None:
    assert set(MAKERS) == set(SCHEDULES)
    whole = _used(MAKERS[name](_optimizer()), 25)
    first = MAKERS[name](_optimizer())
    before = _used(first, stop)
    saved = pickle.loads(pickle.dumps((first.state_dict(), first.optimizer.state_dict())))
    # The optimizer is restored before its schedule is made, as happens when a checkpoint is loaded early.
    optimizer = _optimizer()
    optimizer.load_state_dict(saved[1])
    second = MAKERS[name](optimizer)
    second.load_state_dict(saved[0])
    assert before + _used(second, 25 - stop) == whole
    # The schedule alone is enough: it sets the rates when it is loaded.
    alone = MAKERS[name](_optimizer())
    alone.load_state_dict(saved[0])
    assert _used(alone, 25 - stop) == whole[stop:]
    assert alone.optimizer.param_groups[0]["betas"] == second.optimizer.param_groups[0]["betas"]


def test_base_rates_come_from_the_state() -> None:
    first = WarmupLR(_optimizer((0.1,)), warmup_num_steps=2)
    first.step(5)
    second = WarmupLR(_optimizer((0.7,)), warmup_num_steps=2)  # e.g. made after a decayed rate was restored
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == second.base_lrs == [0.1]


def test_foreign_and_broken_states() -> None:
    schedule = WarmupLR(_optimizer(), 0.0, 1.0, 4, "linear")
    schedule.load_state_dict({"last_batch_iteration": 2})
    assert schedule.get_last_lr() == [0.5] and schedule.last_epoch == 3
    with pytest.raises(CheckpointError, match="last_batch_iteration"):
        schedule.load_state_dict({"last_epoch": 2})


def test_it_is_a_torch_schedule_and_leaves_the_optimizer_alone() -> None:
    optimizer = _optimizer()
    step = optimizer.step.__func__  # type: ignore[attr-defined]
    schedule = WarmupLR(optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert optimizer.step.__func__ is step  # type: ignore[attr-defined]


def _built(kind: str, **params: Any) -> Any:
    section = Config.load({"scheduler": {"type": kind, "params": params}}).scheduler
    assert section is not None
    return build_scheduler(section, _optimizer())


def test_built_from_the_configuration() -> None:
    schedule = _built("warmuplr", warmup_min_lr=0, warmup_max_lr="1e-3", warmup_num_steps="4", warmup_type="linear")
    assert isinstance(schedule, WarmupLR)
    assert _used(schedule, 4) == pytest.approx([0, 0, 0.00025, 0.0005])
    assert isinstance(_built("CosineAnnealingLR", T_max=5, eta_min="1e-5"), torch.optim.lr_scheduler.CosineAnnealingLR)
    assert isinstance(_built("MultiStepLR", milestones=[2, 4]), torch.optim.lr_scheduler.MultiStepLR)
    assert _built("WarmupLR").get_last_lr() == [0.0]


@pytest.mark.parametrize(
    ("kind", "params", "what"),
    [
        ("WarmupLR", {"warmup_steps": 3}, "`scheduler.params.warmup_steps` is not .* did you mean `warmup_num_steps`"),
        ("WarmupDecayLR", {}, "`scheduler.params.total_num_steps` is missing"),
        ("WarmupDecayLR", {"total_num_steps": -1}, "`total_num_steps` has the value -1: expected an integer of 1"),
        ("WarmupLR", {"warmup_max_lr": -1}, "`warmup_max_lr` has the value -1"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "`warmup_num_steps` has the value 2.5"),
        ("WarmupLR", {"warmup_num_steps": -1}, "`warmup_num_steps` has the value -1"),
        ("WarmupLR", {"warmup_type": "cubic"}, "`warmup_type` .* \"log\" or \"linear\""),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "`lr_range_test_step_size` has the value 0"),
        ("OneCycle", {"cycle_min_lr": 1}, "`scheduler.params.cycle_max_lr` is missing"),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_momentum": "yes"}, "`cycle_momentum` .* true"),
        ("CosineAnnealingLR", {"t_max": 5}, "`scheduler.params.t_max` is not .* did you mean `T_max`"),
        ("OneCycleLR", {"max_lr": 0.1}, "do not fit OneCycleLR: .*max_lr"),
        ("LambdaLR", {}, "needs a function"),
        ("ReduceLROnPlateau", {}, "needs a metric"),
    ],
)  # fmt: skip
def test_errors_name_the_parameter(kind: str, params: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        _built(kind, **params).step()


def test_an_optimizer_is_needed() -> None:
    with pytest.raises(TypeError, match="param_groups"):
        WarmupLR(object())  # type: ignore[arg-type]
