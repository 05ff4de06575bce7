"""What the fused optimizers share: checks, step counts, one call for all parameters, and state that torch's classes load."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from zeroengine.errors import ConfigError
from zeroengine.ops import flat
from zeroengine.ops.native import Segment
from zeroengine.ops.pages import zeros_like
from zeroengine.ops.rules import Numbers, Rule

Group = dict[str, Any]

# Switches of torch's classes that choose an implementation, and may come with their state.
_REFUSED = ("maximize", "differentiable")


def state_dtype(param: Tensor) -> torch.dtype:
    """fp32 for parameters of 32 bits and fewer: moments in 16 bits lose small gradients."""
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def check_range(name: str, value: float, low: float = 0.0, below: float = float("inf")) -> None:
    if not low <= value < below:
        limit = f"and below {below:g} " if below != float("inf") else ""
        raise ConfigError(f"optimizer parameter {name}={value}: it is at least {low:g} {limit}and a finite number")


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """What a step returns: the loss of its closure, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _alike(p: Tensor, t: Tensor) -> bool:
    return t.shape == p.shape and t.device == p.device


def _fits(p: Tensor, grad: Tensor) -> bool:
    strided = p.layout is torch.strided and grad.layout is torch.strided
    return strided and p.is_floating_point() and grad.is_floating_point() and _alike(p, grad)


def _count(step: Tensor) -> float:
    """Adds one to a 0-dim fp32 tensor on the CPU, as torch keeps its steps, and returns it. Where it lies: an operation of torch
    costs microseconds for each parameter, and tens of them after an update that filled the caches with other things."""
    value = ctypes.c_float.from_address(step.data_ptr())
    value.value += 1.0
    return value.value


class Plan(NamedTuple):
    """What happens to the parameters of a group in a step."""

    rule: Rule
    states: tuple[str, ...]  # names, in the order of the rule
    start: float = 0.0  # what new states are full of


class FusedOptimizer(torch.optim.Optimizer):
    """Base of optimizers that update each element by itself, all parameters in one pass over the memory.

    A subclass says for a group which rule applies, with which states and numbers. Parameters may be fp32 (the usual case:
    masters), bf16, fp16 or fp64, on a CPU or a GPU; states are fp32 (fp64 for fp64).
    """

    elementwise: ClassVar[bool] = True
    counted: ClassVar[bool] = True  # each parameter has a state `step`

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float | Tensor = 1.0,
        copies: Mapping[Tensor, Tensor] | None = None,
        grads: Mapping[Tensor, Tensor] | None = None,
    ) -> Any:
        """One step for all parameters that have a gradient. Gradients are read once and not changed.

        Args:
            closure: computes the loss again, as in torch; its value is returned.
            grad_scale: factor on every gradient (unscaling and clipping in one). A 0-dim tensor on a GPU is read there,
                without waiting for it.
            copies: for a parameter, a tensor of its shape (fp32, bf16 or fp16) that gets its new values, rounded.
            grads: for a parameter, its gradient (fp32, bf16 or fp16) in place of `.grad`.

        Raises:
            ConfigError: a gradient or copy does not fit its parameter. Nothing has been changed then.
        """
        loss = evaluate(closure)
        found: list[tuple[int, Tensor, Tensor, Tensor | None]] = []
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                grad = p.grad if grads is None else grads.get(p, p.grad)
                if grad is not None:
                    copy = None if copies is None else copies.get(p)
                    if not _fits(p, grad) or (copy is not None and not _alike(p, copy)):
                        raise self._misfit(f"parameter {i} of group {g}", p, grad, copy)
                    found.append((g, p, grad, copy))
        plans = [self._plan(group) for group in self.param_groups]
        ready = [self._ready(plans[g], p, grad) for g, p, grad, _ in found]
        work: dict[Rule, list[Segment]] = {}
        known: dict[tuple[int, float], Numbers] = {}
        for (g, p, grad, copy), (states, step, fresh) in zip(found, ready, strict=True):
            mark = (1.0 if fresh else 2.0) if step is None else _count(step)
            hypers = known.get((g, mark))
            if hypers is None:
                hypers = known[g, mark] = self._hypers(self.param_groups[g], mark)
            work.setdefault(plans[g].rule, []).append((p, grad, states, copy, hypers))
        for rule, segments in work.items():
            flat.update(rule, segments, grad_scale, self._library)
        return loss

    def _library(self, device: torch.device) -> ctypes.CDLL | None:
        known: dict[torch.device, ctypes.CDLL | None] = self.__dict__.setdefault("_libraries", {})
        if device not in known:
            known[device] = flat.update_library(device)
        return known[device]

    def _plan(self, group: Group) -> Plan:
        """What happens to a group's parameters in this step."""
        raise NotImplementedError(f"{type(self).__name__} is a base class; use one of its subclasses")

    def _hypers(self, group: Group, mark: float) -> Numbers:
        """Numbers of a group's parameters in their step number `mark`, from 1 (where steps are not counted: 1 is the first,
        2 every other)."""
        raise NotImplementedError(f"{type(self).__name__} is a base class; use one of its subclasses")

    def _ready(self, plan: Plan, p: Tensor, grad: Tensor) -> tuple[list[Tensor], Tensor | None, bool]:
        """The states, which are made if need be, the count of steps where there is one, and whether the parameter had no state."""
        state = self.state.get(p, {})
        step = state.get("step") if self.counted else None
        fresh = step is None and all(value is None for value in state.values())
        states: list[Tensor] = []
        for name in plan.states:
            held = state.get(name)
            if held is None:
                held = state[name] = zeros_like(p, state_dtype(p), beside=(p, grad, *states))
                if plan.start:
                    held.fill_(plan.start)
            states.append(held)
        if self.counted and (type(step) is not Tensor or step.dtype is not torch.float32 or step.dim() or not step.is_cpu):
            step = state["step"] = torch.tensor(float(step or 0), dtype=torch.float32, device="cpu")
        if fresh and state:
            self.state[p] = state
        return states, step, fresh

    def _misfit(self, who: str, p: Tensor, grad: Tensor, copy: Tensor | None) -> ConfigError:
        name = type(self).__name__
        if grad.layout is not torch.strided or p.layout is not torch.strided:
            return ConfigError(f"{name}: {who} has a sparse gradient; use torch.optim.SparseAdam or sparse=False")
        if not (p.is_floating_point() and grad.is_floating_point()):
            return ConfigError(f"{name}: {who} is {p.dtype}; it takes real floating-point numbers, torch.optim takes others")
        what, t = ("gradient", grad) if copy is None or not _alike(p, grad) else ("copy", copy)
        return ConfigError(f"{name}: {who} has shape {tuple(p.shape)} on {p.device}, its {what} {tuple(t.shape)} on {t.device}")

    # --- state --------------------------------------------------------------------------------------------------------

    def _fixed(self) -> dict[str, Any]:
        """What a subclass fixes for all groups; groups of another kind are not loaded into it."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # torch says what is wrong with another
            self._check(param_group)
        super().add_param_group(param_group)

    def _check(self, group: Mapping[str, Any]) -> None:
        name = type(self).__name__
        for key, value in self._fixed().items():
            if group.get(key, value) != value:
                raise ConfigError(
                    f"{name} has {key}={value} and was given a group with {key}={group[key]}; state goes into the optimizer it came "
                    "from, or into one built with the same option"
                )
        for key in _REFUSED:
            if group.get(key):
                raise ConfigError(f"{name} was given a parameter group with {key}=True, which it does not have; use torch's optimizer")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also of torch's class of the same rule, and of this one's files from other devices. Moments keep their precision
        where the parameters are 16-bit (torch rounds them to the parameters' dtype)."""
        for group in state_dict["param_groups"]:
            self._check(group)
        super().load_state_dict(state_dict)
        given = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(given, mine, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if key != "step" and isinstance(value, Tensor) and value.is_floating_point():
                    if self.state[p][key].dtype is not state_dtype(p):
                        self.state[p][key] = value.to(p.device, state_dtype(p), copy=True)


def as_betas(betas: Iterable[float]) -> tuple[float, float]:
    first, second = betas
    check_range("betas[0]", first, below=1.0)
    check_range("betas[1]", second, below=1.0)
    return float(first), float(second)
