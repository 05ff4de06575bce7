"""The rules by which an optimizer changes one element, and the numbers of a step that each needs.

A rule is what csrc/ze/rules.h and zeroengine/ops/twins.py both compute. Its hypers are computed here, in double precision, once
for all elements, and rounded to fp32 once by whoever uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroengine.ops import twins

HYPERS = 8  # numbers in a row, unused ones 0; kHypers of csrc/ze/rules.h


@dataclass(frozen=True, eq=False)  # each is itself: equality would hash all fields for each parameter in each step
class Rule:
    """`code` is RuleCode of csrc/ze/rules.h; `states`: fp32 tensors beside each parameter."""

    name: str
    code: int
    states: int
    twin: twins.ElementRule


ADAM = Rule("adam", 0, 2, twins.adam)
ADAMW = Rule("adamw", 1, 2, twins.adamw)
ADAM_MAX = Rule("adam with amsgrad", 2, 3, twins.adam)
ADAMW_MAX = Rule("adamw with amsgrad", 3, 3, twins.adamw)
LION = Rule("lion", 4, 1, twins.lion)
ADAGRAD = Rule("adagrad", 5, 1, twins.adagrad)
SGD = Rule("sgd", 6, 0, twins.sgd)
SGD_MOMENTUM = Rule("sgd with momentum", 7, 1, twins.sgd_momentum)
SGD_NESTEROV = Rule("sgd with Nesterov momentum", 8, 1, twins.sgd_nesterov)

Numbers = tuple[float, ...]


def _row(*numbers: float) -> Numbers:
    return (*numbers, *(0.0,) * (HYPERS - len(numbers)))


def adam_hypers(
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> Numbers:
    """`step` counts from 1."""
    beta1, beta2 = betas
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    decay = 1 - lr * weight_decay if decoupled else weight_decay
    return _row(1 - beta1, beta2, 1 - beta2, lr / first, 1 / math.sqrt(second), eps, decay)


def lion_hypers(lr: float, betas: tuple[float, float], weight_decay: float) -> Numbers:
    return _row(1 - betas[0], 1 - betas[1], lr, 1 - lr * weight_decay)


def adagrad_hypers(step: float, lr: float, lr_decay: float, eps: float, weight_decay: float) -> Numbers:
    """`step` counts from 1."""
    return _row(lr / (1 + (step - 1) * lr_decay), eps, weight_decay)


def sgd_hypers(first: bool, lr: float, momentum: float, dampening: float, weight_decay: float) -> Numbers:
    """`first`: the parameter has no momentum yet, and its buffer starts as the gradient, undampened, as in torch."""
    if first:
        return _row(lr, weight_decay, 0.0, 1.0, momentum)
    return _row(lr, weight_decay, momentum, 1 - dampening, momentum)
