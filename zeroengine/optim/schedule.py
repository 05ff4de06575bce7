"""What all learning-rate schedules share: the count of steps, the groups' rates, the state, checked parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zeroengine.config.values import plain_flag, plain_number, show
from zeroengine.errors import CheckpointError, ConfigError
from zeroengine.logging import log_once

Rates = float | Sequence[float]


class Schedule(LRScheduler):
    """Base: counts steps, writes rates, saves the count. A subclass gives `_rates`."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        """`optimizer` is anything with `param_groups`. With `last_batch_iteration` of 0 or more the schedule continues
        and leaves the rates alone until the next step."""
        # The parent's constructor wraps optimizer.step to watch the order of calls; the engine keeps that order itself.
        if not hasattr(optimizer, "param_groups"):
            name = type(optimizer).__name__
            raise TypeError(f"{type(self).__name__} needs an optimizer with param_groups, not {name}")
        self.optimizer = optimizer
        self.last_batch_iteration = self._whole("last_batch_iteration", last_batch_iteration, minimum=-1)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", _number(group["lr"]))
        self._last_lr: list[float | Tensor] = [group["lr"] for group in optimizer.param_groups]

    def _start(self) -> None:
        """To be called at the end of a subclass's constructor."""
        if self.last_batch_iteration < 0:
            self._apply()

    def _rates(self, iteration: int) -> list[float]:
        """One rate a group after the step with this index; -1 is before the first."""
        raise NotImplementedError

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group at the current count."""
        return list(self._rates(self.last_batch_iteration))

    def get_last_lr(self) -> list[float | Tensor]:
        """The rate of each group, as last set."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Counts one optimizer step, or goes to the count given, and sets the rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """The count; parameters come from the configuration, base rates from the groups (`initial_lr`)."""
        return {
            "last_batch_iteration": self.last_batch_iteration,
            "base_lrs": [group["initial_lr"] for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from the count in `state_dict` and sets the rates. Raises `CheckpointError` if it has none."""
        if "last_batch_iteration" not in state_dict:
            raise CheckpointError(f"the state of {type(self).__name__} has no last_batch_iteration: {show(state_dict)}")
        base = state_dict.get("base_lrs")
        if base is not None and len(base) == len(self.optimizer.param_groups):
            for group, rate in zip(self.optimizer.param_groups, base, strict=True):
                group["initial_lr"] = rate
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._apply()

    @property
    def base_lrs(self) -> list[float]:  # type: ignore[override]
        """The rate that each group had before any schedule touched it."""
        return [group["initial_lr"] for group in self.optimizer.param_groups]

    @property
    def last_epoch(self) -> int:
        """torch's name for the count; it starts at 0."""
        return self.last_batch_iteration + 1

    @last_epoch.setter
    def last_epoch(self, count: int) -> None:
        self.last_batch_iteration = count - 1

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", _number(group["lr"]))  # a group that was added later
        rates = self._rates(self.last_batch_iteration)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _each(self, name: str, value: Rates) -> list[float]:
        """`value` for each group: one for all, or a list with one a group."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence) or isinstance(value, str):
            return [self._real(name, value)] * count
        if len(value) != count:
            self._wrong(name, value, f"one number, or {count}: one for each parameter group")
        return [self._real(name, item) for item in value]

    def _real(self, name: str, value: Any) -> float:
        number = plain_number(value)
        if number is None or not math.isfinite(number) or number < 0:
            self._wrong(name, value, "a finite number of 0 or more")
        return float(number)

    def _whole(self, name: str, value: Any, minimum: int) -> int:
        number = plain_number(value)
        if number is None or not math.isfinite(number) or number != int(number) or number < minimum:
            self._wrong(name, value, f"an integer of {minimum} or more")
        return int(number)

    def _flag(self, name: str, value: Any) -> bool:
        flag = plain_flag(value)
        if flag is None:
            self._wrong(name, value, "true or false")
        return flag

    def _wrong(self, name: str, value: Any, wanted: str) -> NoReturn:
        raise ConfigError(f"{type(self).__name__}: `{name}` has the value {show(value)}: expected {wanted}")


def _number(rate: float | Tensor) -> float:
    return float(rate)


class Warmup:
    """The rising part: how much of the way is done after `iteration` steps, for iteration < `steps`."""

    def __init__(self, schedule: Schedule, steps: Any, shape: str) -> None:
        if shape not in ("log", "linear"):
            schedule._wrong("warmup_type", shape, '"log" or "linear"')
        given = schedule._whole("warmup_num_steps", steps, minimum=0)
        self.steps = max(2, given) if given else 0
        self._linear = shape == "linear"
        self._name = type(schedule).__name__

    def share(self, iteration: int) -> float:
        """From 0 to 1."""
        return iteration / self.steps if self._linear else math.log(iteration + 1) / math.log(self.steps)

    def warn_if_longer_than(self, total: int) -> None:
        """A schedule that ends before its warm-up is legal, and rarely meant."""
        if total < self.steps:
            log_once(
                f"{self._name}: total_num_steps {total} is less than warmup_num_steps {self.steps}: "
                "the rate falls to its end when the warm-up ends"
            )
