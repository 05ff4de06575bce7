"""Runs a checked schedule on one rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zeroengine.comm.protocol import Communicator
from zeroengine.pipeline.actions import COMPUTE, RECEIVES, Action, Kind
from zeroengine.pipeline.checks import Checked
from zeroengine.pipeline.simulate import Span
from zeroengine.pipeline.stage import StageForward, StageRunner, as_input
from zeroengine.pipeline.wire import Pending, Wire

_Key = tuple[Kind, int, int]


class StageHooks(Protocol):
    """What happens around the computations of a stage: where sharded weights and reductions come in."""

    def gather(self, stage: int) -> None:
        """The stage's weights are needed soon."""
        ...

    def before_backward(self, micro: int) -> None:
        """A part of a backward of this micro-batch follows."""
        ...

    def before_gradients(self, stage: int, last: bool) -> None:
        """Gradients of the stage's weights follow; `last` if no more will in this step."""
        ...

    def after_backward(self, stage: int, weights: bool) -> None:
        """A part of a backward ended; `weights` if it was one that makes the weights' gradients."""
        ...

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """A context around the computation, when what it needs has arrived."""
        ...


@dataclass
class Run:
    """What a run left: outputs of the last stage by micro-batch (detached; on its rank only), the measured spans of this
    rank in seconds of the monotonic clock, and the most micro-batches whose activations it held at once."""

    outputs: dict[int, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    peak_live: int = 0


class Executor:
    """Messages never make a computation wait that does not need them: sends return at once, and receives are posted before
    the computation in front of the one that uses them. `stream` and `extra` join the ranks of the pipeline (see `Wire`)."""

    def __init__(
        self, stages: int, placement: tuple[int, ...], forward: StageForward, stream: Communicator, extra: Communicator,
        device: torch.device, hooks: StageHooks,
    ) -> None:  # fmt: skip
        self._rank = stream.rank
        self._placement = placement
        self._hooks = hooks
        mine = [s for s in range(stages) if placement[s] == self._rank]
        self.runners = {s: StageRunner(s, s == stages - 1, forward) for s in mine}
        self._stream, self._extra, self._device = stream, extra, device
        self._wires: dict[int, Wire] = {}
        self._reset()

    def _reset(self) -> None:
        self._pending: dict[_Key, Pending] = {}
        self._local: dict[_Key, Any] = {}  # what goes to another stage on this rank, and outputs until they are sent
        self._last_gradient: set[int] = set()
        self._run = Run()

    def wire(self, peer: int) -> Wire:
        if peer not in self._wires:
            self._wires[peer] = Wire(self._stream, self._extra, peer, self._device)
        return self._wires[peer]

    def run(self, checked: Checked, feed: Mapping[int, Any] | None) -> Run:
        """One pass. `feed`: the input of the first stage by micro-batch, needed on its rank. An exception leaves nothing in
        flight on this rank; the others notice that it is gone."""
        schedule = checked.schedule
        actions = schedule.ranks[self._rank]
        self._reset()
        try:
            self._post(checked, actions)
            for i, action in enumerate(actions):
                if action.kind in COMPUTE:
                    self._post(checked, actions[i + 1 :])
                    self._compute(checked, action, feed or {})
                elif action.kind is Kind.GATHER:
                    self._hooks.gather(action.stage)
                elif action.kind is Kind.REDUCE:
                    self._last_gradient.add(action.stage)
                elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                    message = schedule.message(action)
                    tree = self._local.pop((action.kind, action.stage, action.micro))
                    self.wire(message.dst).send(_edge(message.stage, message.gradient), str(message), tree)
            for wire in self._wires.values():
                wire.finish()
        finally:
            for runner in self.runners.values():
                runner.forget()
            self._local.clear()
        return self._run

    def _post(self, checked: Checked, actions: tuple[Action, ...]) -> None:
        """Asks for the messages that `actions` receive before their second computation."""
        computations = 0
        for action in actions:
            if action.kind in RECEIVES:
                key = (action.kind, action.stage, action.micro)
                if key not in self._pending:
                    message = checked.schedule.message(action)
                    wire = self.wire(message.src)
                    self._pending[key] = wire.want(_edge(message.stage, message.gradient), str(message))
            elif action.kind in COMPUTE:
                computations += 1
                if computations == 2:
                    return

    def _compute(self, checked: Checked, action: Action, feed: Mapping[int, Any]) -> None:
        stage, micro = action.stage, action.micro
        runner = self.runners[stage]
        tree = grads = None
        if action.kind is Kind.FORWARD:
            tree = feed[micro] if stage == 0 else self._arrived(Kind.RECV_ACTIVATION, stage, micro, stage - 1)
        elif action.kind is not Kind.WEIGHT and not runner.is_last:
            grads = self._arrived(Kind.RECV_GRADIENT, stage, micro, stage + 1)
        start = time.monotonic()
        with self._hooks.computing(action):
            if action.kind is Kind.FORWARD:
                self._pass_on(stage, micro, runner.forward(micro, tree, checked.schedule.trains))
            else:
                self._run_backward(action, runner, grads)
        self._run.spans.append(Span(self._rank, action, start, time.monotonic()))
        live = sum(r.live for r in self.runners.values())
        # a backward holds its activations while it runs: counted by the forward before it
        self._run.peak_live = max(self._run.peak_live, live)

    def _run_backward(self, action: Action, runner: StageRunner, grads: Any) -> None:
        stage, micro, weights = action.stage, action.micro, action.kind is not Kind.INPUT
        self._hooks.before_backward(micro)
        if weights:
            self._hooks.before_gradients(stage, stage in self._last_gradient)
        if action.kind is Kind.WEIGHT:
            runner.weight_gradient(micro)
        else:
            step = runner.backward if action.kind is Kind.BACKWARD else runner.input_gradient
            self._pass_back(stage, micro, step(micro, grads))
        self._hooks.after_backward(stage, weights)

    def _arrived(self, kind: Kind, stage: int, micro: int, source: int) -> Any:
        key = (kind, stage, micro)
        if self._placement[source] == self._rank:
            return self._local.pop(key)
        return self.wire(self._placement[source]).get(self._pending.pop(key))

    def _pass_on(self, stage: int, micro: int, output: Any) -> None:
        if self.runners[stage].is_last:
            self._run.outputs[micro] = output.detach() if isinstance(output, torch.Tensor) else output
        elif self._placement[stage + 1] == self._rank:
            self._local[Kind.RECV_ACTIVATION, stage + 1, micro] = as_input(
                output, f"activation into stage {stage + 1}, micro-batch {micro}"
            )
        else:
            self._local[Kind.SEND_ACTIVATION, stage, micro] = output

    def _pass_back(self, stage: int, micro: int, grads: list[torch.Tensor | None]) -> None:
        if stage == 0:
            return
        here = self._placement[stage - 1] == self._rank
        key = (Kind.RECV_GRADIENT, stage - 1, micro) if here else (Kind.SEND_GRADIENT, stage, micro)
        self._local[key] = grads


def _edge(stage: int, gradient: bool) -> str:
    return f"{'gradient' if gradient else 'activation'} {stage}"
