"""What one micro-batch takes in one stage: figures that add up over blocks and micro-batches, and how they are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zeroengine.monitor.alive import Alive
from zeroengine.planner.paper import PaperFabric

_Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Pass:
    """One micro-batch, forward and backward. Bytes: `saved` is kept from forward to backward, `peak` the most that is alive at once
    (without parameters and their gradients' buffers), `touched` what operations other than matrix products read and write, `sent`
    by "communicator.operation". `flops`: of matrix products, `forward_flops` those of forward, recomputation not included.
    `operations`, `calls`: numbers of operations, and of collectives by name."""

    saved: float = 0.0
    peak: float = 0.0
    flops: float = 0.0
    forward_flops: float = 0.0
    touched: float = 0.0
    forward_touched: float = 0.0
    operations: float = 0.0
    sent: _Numbers = field(default_factory=dict)
    calls: _Numbers = field(default_factory=dict)

    def plus(self, other: Pass, times: float = 1.0) -> Pass:
        """This and `times` the other one, entry by entry."""
        made: dict[str, Any] = {}
        for name, mine in self.__dict__.items():
            theirs = getattr(other, name)
            if isinstance(mine, (int, float)):
                made[name] = mine + times * theirs
            else:
                made[name] = {k: mine.get(k, 0.0) + times * theirs.get(k, 0.0) for k in {**mine, **theirs}}
        return Pass(**made)

    def minus(self, other: Pass) -> Pass:
        return self.plus(other, -1.0)


class Ledger(Alive):
    """Counts FLOPs and memory of what runs inside. Works on fake tensors, whose storages live and die like real ones.

    `known`: storages that are not counted (parameters). A matrix product is what torch's flop counter has a formula for.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(known)
        self.flops = self.touched = 0.0
        self.operations = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        attention = _attention_flops(func._overloadpacket.__name__, args, kwargs or {})
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if attention:
            self.flops += attention
            self.operations += 1
        elif formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
            self.operations += 1
        elif not func.is_view and any(_bytes(t) for t in outputs):
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.touched += sum(map(_bytes, (*inputs, *outputs)))
            self.operations += 1
        self.see(func, outputs)
        self.peak = max(self.peak, self.alive())
        return out


def _attention_flops(name: str, args: Any, kwargs: Any) -> float:
    """Of torch's fused attention kernels: two products forward and, with the scores computed again, five backward; half of the
    pairs under a causal mask. 0 for any other operation."""
    if "scaled_dot_product" not in name or name.endswith("math"):
        return 0.0
    backward = name.endswith("backward")
    first = 1 if backward else 0  # backward begins with the gradient
    q, k, v = args[first : first + 3]
    causal = bool(kwargs.get("is_causal", any(a is True for a in args)))
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
    width = q.shape[3] + v.shape[3]
    return 2.0 * pairs * width * (2.5 if backward else 1.0)


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def count_pass(
    run: Callable[[], Iterable[Tensor]], parameters: Iterable[torch.nn.Parameter], inputs: Iterable[Tensor], fabric: PaperFabric
) -> Pass:
    """Runs `run`, which makes the outputs of a stage, and their backward, and counts. Gradients of parameters go as soon as
    they are made, as the engine's hooks take them."""
    params = list(parameters)
    handles = [p.register_post_accumulate_grad_hook(_drop) for p in params if p.requires_grad]
    given = list(inputs)
    fabric.forget_sent()
    try:
        with Ledger([*params, *given]) as ledger:
            outputs = [t for t in run() if t.requires_grad]
            flops, touched = ledger.flops, ledger.touched
            saved = ledger.alive()
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
        del outputs
    finally:
        for handle in handles:
            handle.remove()
    sent, calls = fabric.sent(), fabric.calls()
    fabric.forget_sent()
    return Pass(float(saved), float(ledger.peak), ledger.flops, flops, ledger.touched, touched, float(ledger.operations), sent, calls)


def _drop(param: Tensor) -> None:
    param.grad = None
