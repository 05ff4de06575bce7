"""One stage at work: forward, and backward whole or in two parts, for any number of micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from zeroengine.errors import ModelError
from zeroengine.pipeline.split import Grads, WeightTask, accumulate, input_gradients
from zeroengine.pipeline.wire import pickled

StageForward = Callable[[int, int, Any], Any]
"""(stage, micro-batch, input) -> output. For the last stage the output is the scalar that backward starts from."""


class _Entry(torch.autograd.Function):
    """The stage's input as an inner tensor of the graph, so that a stage may change it in place as a whole model may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@dataclass
class _Flight:
    """A micro-batch between forward and backward: leaves of the input and of the output that require grad."""

    inputs: list[Tensor]
    outputs: list[Tensor]


def leaves_with_grad(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.requires_grad]


def as_input(tree: Any, subject: str = "the input of the next stage") -> Any:
    """The output of a stage as the input of the next on the same rank: the same values, a graph of its own. Refuses what could
    not go to another rank."""
    pickled([leaf for leaf in tree_leaves(tree) if not isinstance(leaf, Tensor | NoneType | bool | int | float | str)], subject)
    return tree_map(lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, tree)


class StageRunner:
    """Runs `forward` for one stage and keeps what backward needs, as long as the schedule says."""

    def __init__(self, stage: int, is_last: bool, forward: StageForward) -> None:
        self.stage = stage
        self.is_last = is_last
        self._forward = forward
        self._flights: dict[int, _Flight] = {}
        self._tasks: dict[int, WeightTask] = {}

    @property
    def live(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._flights) + len(self._tasks)

    def forward(self, micro: int, tree: Any, trains: bool) -> Any:
        """`tree` holds leaves of the graph. Returns the output, still attached to it."""
        with torch.set_grad_enabled(trains):
            given = tree_map(lambda t: _Entry.apply(t) if trains and isinstance(t, Tensor) and t.requires_grad else t, tree)
            output = self._forward(self.stage, micro, given)
        if trains:
            outputs = leaves_with_grad(output)
            if self.is_last and (not isinstance(output, Tensor) or output.numel() != 1 or not outputs):
                shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise ModelError(
                    f"the last stage must end in a scalar loss that requires grad, not {shape}; give PipelineModule a loss_fn, "
                    "and check that the model is not frozen or detached"
                )
            self._flights[micro] = _Flight(leaves_with_grad(tree), outputs)
        return output

    def backward(self, micro: int, grads: Grads | None) -> Grads:
        """Gradients of the input's leaves that require grad; those of the weights are accumulated. `grads`: of the output's
        leaves, None for the last stage."""
        flight = self._flights.pop(micro)
        roots, given = self._roots(flight, grads)
        if roots:
            torch.autograd.backward(roots, given)
        return [t.grad for t in flight.inputs]

    def input_gradient(self, micro: int, grads: Grads | None) -> Grads:
        """As `backward`, without the weights' gradients, which `weight_gradient` brings later."""
        flight = self._flights.pop(micro)
        roots, given = self._roots(flight, grads)
        if not roots:
            self._tasks[micro] = WeightTask([], [])
            return [None] * len(flight.inputs)
        found, self._tasks[micro] = input_gradients(roots, given, flight.inputs)
        if not self.stage:  # the user's own tensors: they get their gradients as from any backward
            for tensor, grad in zip(flight.inputs, found, strict=True):
                if grad is not None and tensor.is_leaf:
                    accumulate(get_gradient_edge(tensor), grad)
                elif grad is not None:
                    torch.autograd.backward([tensor], [grad])
        return found

    def weight_gradient(self, micro: int) -> None:
        self._tasks.pop(micro).run()

    def forget(self) -> None:
        """Drops everything in flight."""
        self._flights.clear()
        self._tasks.clear()

    def _roots(self, flight: _Flight, grads: Grads | None) -> tuple[list[Tensor], list[Tensor]]:
        if grads is None:
            return flight.outputs, [torch.ones_like(t) for t in flight.outputs]
        if len(grads) != len(flight.outputs):
            raise ModelError(
                f"stage {self.stage}: {len(grads)} gradients came back for {len(flight.outputs)} tensors that require grad; the "
                "stages must agree on what requires grad"
            )
        pairs = [(t, g) for t, g in zip(flight.outputs, grads, strict=True) if g is not None]
        return [t for t, _ in pairs], [g for _, g in pairs]
