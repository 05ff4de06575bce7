"""Learning-rate schedules with the parameters, defaults and values that DeepSpeed users know.

A schedule counts optimizer steps: `last_batch_iteration` is -1 when it is made and one more after every `step()`. Rates
are set in the optimizer's groups when the schedule is made, so that the first optimizer step already has its rate, and
depend on the count alone, so that a resumed schedule gives the same bits.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zeroengine.config import SchedulerSection
from zeroengine.config.values import plain_number, show
from zeroengine.errors import ConfigError
from zeroengine.logging import log_once
from zeroengine.optim.schedule import Rates, Schedule, Warmup
from zeroengine.wording import did_you_mean


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, then constant.

    The growth is the logarithm of the count ("log") or the count itself ("linear"). `warmup_max_lr` null is each
    group's own rate. 1 warm-up step counts as 2, as in DeepSpeed; 0 is no warm-up.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._minimum, self._maximum = warmup_min_lr, warmup_max_lr
        self._warmup = Warmup(self, warmup_num_steps, warmup_type)
        self._start()

    def _rates(self, iteration: int) -> list[float]:
        share = self._share(max(iteration, 0))
        low = self._each("warmup_min_lr", self._minimum)
        high = self.base_lrs if self._maximum is None else self._each("warmup_max_lr", self._maximum)
        return [small + (big - small) * share for small, big in zip(low, high, strict=True)]

    def _share(self, iteration: int) -> float:
        """0 at `warmup_min_lr`, 1 at `warmup_max_lr`."""
        return self._warmup.share(iteration) if iteration < self._warmup.steps else 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line from `warmup_max_lr` to `warmup_min_lr` at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = self._whole("total_num_steps", total_num_steps, minimum=1)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warmup.warn_if_longer_than(self._total)

    def _share(self, iteration: int) -> float:
        if iteration < self._warmup.steps:
            return self._warmup.share(iteration)
        return max(0.0, (self._total - iteration) / max(1, self._total - self._warmup.steps))


class WarmupCosineLR(Schedule):
    """Each group's own rate times a ratio: from `warmup_min_ratio` to 1 in `warmup_num_steps` steps, then half a cosine
    down to `cos_min_ratio` at step `total_num_steps`.

    The first step has the ratio `warmup_min_ratio`, where DeepSpeed trains it with rate 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._total = self._whole("total_num_steps", total_num_steps, minimum=1)
        self._lowest_warmup = self._real("warmup_min_ratio", warmup_min_ratio)
        self._lowest = self._real("cos_min_ratio", cos_min_ratio)
        self._warmup = Warmup(self, warmup_num_steps, warmup_type)
        self._warmup.warn_if_longer_than(self._total)
        self._start()

    def _rates(self, iteration: int) -> list[float]:
        ratio = self._ratio(max(iteration, 0))
        return [rate * ratio for rate in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < self._warmup.steps:
            return self._lowest_warmup + (1.0 - self._lowest_warmup) * self._warmup.share(iteration)
        passed = iteration - self._warmup.steps + 1
        progress = min(1.0, passed / max(1, self._total - self._warmup.steps))
        return max(0.0, self._lowest + (1.0 - self._lowest) * (1.0 + math.cos(math.pi * progress)) / 2.0)


class LRRangeTest(Schedule):
    """A rate that grows without end, to find where training breaks (Smith, "A disciplined approach to neural network
    hyper-parameters", 2018): `min_lr * (1 + step_rate * n / step_size)` after n steps, n / step_size rounded down in
    stairs."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._minimum = lr_range_test_min_lr
        self._size = self._whole("lr_range_test_step_size", lr_range_test_step_size, minimum=1)
        self._rate = self._real("lr_range_test_step_rate", lr_range_test_step_rate)
        self._stairs = self._flag("lr_range_test_staircase", lr_range_test_staircase)
        self._start()

    def _rates(self, iteration: int) -> list[float]:
        passed = (iteration + 1) / self._size
        growth = 1.0 + self._rate * (math.floor(passed) if self._stairs else passed)
        return [rate * growth for rate in self._each("lr_range_test_min_lr", self._minimum)]


class OneCycle(Schedule):
    """One cycle of the rate from `cycle_min_lr` up to `cycle_max_lr` and back, then a decay; the first beta of Adam's
    kind of optimizers goes the other way (Smith, 2018, as above).

    The second beta stays as it is, where DeepSpeed sets it to 0.99, and the first step has `cycle_max_mom` with
    `cycle_min_lr`, where DeepSpeed has `cycle_min_mom`. Optimizers without `betas` keep their momentum.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._low, self._high = cycle_min_lr, cycle_max_lr
        self._decay = self._real("decay_lr_rate", decay_lr_rate)
        self._up = self._whole("cycle_first_step_size", cycle_first_step_size, minimum=1)
        self._up_stairs = self._whole("cycle_first_stair_count", cycle_first_stair_count, minimum=0)
        self._down, self._down_stairs = self._up, self._up_stairs
        if cycle_second_step_size is not None:
            self._down = self._whole("cycle_second_step_size", cycle_second_step_size, minimum=0)
        if cycle_second_stair_count is not None:
            self._down_stairs = self._whole("cycle_second_stair_count", cycle_second_stair_count, minimum=0)
        self._decay_steps = self._whole("decay_step_size", decay_step_size, minimum=0)
        self._momentum = self._flag("cycle_momentum", cycle_momentum)
        self._low_momentum, self._high_momentum = cycle_min_mom, cycle_max_mom
        self._momentum_decay = self._real("decay_mom_rate", decay_mom_rate)
        if self._momentum and not any("betas" in group for group in optimizer.param_groups):
            log_once(f"OneCycle: {type(optimizer).__name__} has no betas, its momentum stays as it is")
            self._momentum = False
        self._start()

    def _rates(self, iteration: int) -> list[float]:
        low = self._each("cycle_min_lr", self._low)
        high = self._each("cycle_max_lr", self._high)
        if iteration < self._up + self._down:
            height = self._height(iteration + 1)
            return [small + (big - small) * height for small, big in zip(low, high, strict=True)]
        fall = 1.0 + self._decay * self._intervals(iteration)
        return [small / fall for small in low]

    def _apply(self) -> None:
        super()._apply()
        if not self._momentum:
            return
        low = self._each("cycle_min_mom", self._low_momentum)
        high = self._each("cycle_max_mom", self._high_momentum)
        for group, small, big in zip(self.optimizer.param_groups, low, high, strict=True):
            if "betas" in group:
                group["betas"] = (self._beta(small, big), *group["betas"][1:])

    def _beta(self, small: float, big: float) -> float:
        iteration = self.last_batch_iteration
        if iteration < self._up + self._down:
            return big - (big - small) * self._height(iteration + 1)
        return big * (1.0 + self._momentum_decay * self._intervals(iteration))

    def _height(self, count: int) -> float:
        """0 at the ends of the cycle, 1 at its top."""
        position = count % (self._up + self._down)
        if position <= self._up:
            return _stairs(position, self._up, self._up_stairs)
        return _stairs(self._up + self._down - position, self._down, self._down_stairs)

    def _intervals(self, iteration: int) -> float:
        """Decay intervals since the cycle; 0 when decay is off."""
        return (iteration - self._up - self._down + 1) / self._decay_steps if self._decay_steps else 0.0


def _stairs(position: int, size: int, stairs: int) -> float:
    return math.floor(position * stairs / size) / stairs if stairs else position / size


SCHEDULES: dict[str, type[Schedule]] = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
_NOT_IN_JSON = {
    "LambdaLR": "a function", "MultiplicativeLR": "a function", "SequentialLR": "other schedules",
    "ChainedScheduler": "other schedules", "ReduceLROnPlateau": "a metric at each step",
}  # fmt: skip


def build_scheduler(section: SchedulerSection, optimizer: Optimizer) -> LRScheduler:
    """The schedule that the section `scheduler` describes, on `optimizer`'s groups.

    Raises `ConfigError` that names the parameter if one is unknown, missing or out of range.
    """
    name = section.type
    if name in _NOT_IN_JSON:
        raise ConfigError(
            f"scheduler.type {name} needs {_NOT_IN_JSON[name]}, which a configuration cannot hold; build it in code "
            "and pass it to initialize(lr_scheduler=...)"
        )
    cls: Any = SCHEDULES.get(name) or getattr(lr_scheduler, name)
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in section.params.items()}
    _check_names(cls, params)
    if not issubclass(cls, Schedule):
        params = {key: value if (number := plain_number(value)) is None else number for key, value in params.items()}
    construct: Any = cls
    try:
        schedule: LRScheduler = construct(optimizer, **params)
    except ConfigError as error:
        raise ConfigError(f"scheduler.params: {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"scheduler.params do not fit {name}: {error}; given: {show(params)}") from error
    return schedule


def apply_last_rates(schedule: Any) -> None:
    """Gives the groups the rates of a schedule whose state was loaded. torch's schedules leave that to the state of the
    optimizer, and some compute the next rate from the group's."""
    if isinstance(schedule, LRScheduler):
        for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _check_names(cls: type, params: dict[str, Any]) -> None:
    known = list(inspect.signature(cls).parameters.values())[1:]
    names = [parameter.name for parameter in known]
    for name in params:
        if name not in names:
            hint = did_you_mean(name, names, f"known are {', '.join(names)}")
            raise ConfigError(f"`scheduler.params.{name}` is not a parameter of {cls.__name__}; {hint}")
    for parameter in known:
        if parameter.default is parameter.empty and parameter.name not in params:
            raise ConfigError(f"`scheduler.params.{parameter.name}` is missing: {cls.__name__} needs it")
