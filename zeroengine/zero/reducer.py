"""Reduces gradients while backward runs, in one order of buckets that all ranks share.

A hook on each trainable parameter moves its finished gradient into the bucket's buffer. A complete bucket is launched
once all buckets before it in the order have been: a parameter that one rank does not use delays, it never reorders. What
is left at the end of a micro-batch is launched then, with zeros for what did not contribute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroengine.comm.direct import DirectCommunicator
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import DivergenceError, ModelError
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.gradients import BucketGradients
from zeroengine.zero.moved import MovedGradient, mark_for

IN_FLIGHT = 2  # reductions under way before backward waits for the oldest (where gradients are not kept whole)
_PATIENCE = 1.0  # seconds; longer means that a peer cannot launch yet, and waiting for it could be a deadlock
_POLL = 0.0002


class Reductions(Protocol):
    """What an engine asks of those who reduce its gradients: a `Reducer`, or those of several stages as one. See `Reducer`."""

    gradients: list[BucketGradients]
    scale: float
    synchronize: bool
    guided: bool
    plain: bool

    @property
    def unfinished(self) -> bool: ...

    def mark_backward(self) -> None: ...

    def next_micro_batch(self) -> None: ...

    def finish(self, marks: Sequence[int] = ()) -> tuple[frozenset[str], list[int]]: ...

    def count_as_used(self, bucket: Bucket, index: int) -> None: ...

    def forget(self) -> None: ...

    def clear(self) -> None: ...

    def remove(self) -> None: ...


class Reducer:
    """Owns the gradient hooks and the order of launches.

    `scale`: factor on every contribution (1 / (accumulation steps * loss scale)), set by the engine before backward.
    `synchronize`: whether this backward may launch buckets whose gradients are kept whole (the last micro-batch).
    `guided`: set while `engine.backward` runs; `plain` tells that a gradient came from elsewhere since the last step.
    """

    def __init__(self, gradients: list[BucketGradients], control: Communicator) -> None:
        self.gradients = gradients
        self.scale = 1.0
        self.synchronize = True
        self.guided = False
        self.plain = False
        self._control = control
        # Streams of a device block no host, so nobody compares their operations while they run: `finish` does.
        self._unchecked = [
            s for s in dict.fromkeys(s for g in gradients for s in (*g.streams, g.bucket.comm)) if isinstance(s, DirectCommunicator)
        ]
        self._names = [spec.name for g in gradients for spec in g.bucket.layout.specs]
        self._order = list(reversed(range(len(gradients))))
        self._finished: list[int] = []  # order in which buckets completed, until it is agreed
        self._order_agreed = False
        self._next = 0  # position in the order of the next launch
        self._launched: list[BucketGradients] = []
        self._used: set[str] = set()
        self._backwards = 0  # micro-batches since the last step
        self._dirty = False  # a backward ran in this micro-batch
        self._patient = True
        self._settled = False  # `finish` has been here since the last gradient
        self._handles: list[Any] = []
        for position, g in enumerate(gradients):
            for index, p in enumerate(g.bucket.params):
                self._handles.append(p.register_hook(_unmark(p)))
                self._handles.append(p.register_post_accumulate_grad_hook(self._hook(position, index)))

    # --- during backward ------------------------------------------------------------------------------------------

    def _hook(self, position: int, index: int) -> Callable[[nn.Parameter], None]:
        g = self.gradients[position]
        name = g.bucket.layout.specs[index].name
        mark: MovedGradient | None = None

        def on_gradient(param: Tensor) -> None:
            nonlocal mark
            with torch._C.DisableTorchFunctionSubclass():
                grad = param.grad
                if grad is None:
                    return
                if mark is None or mark.dtype is not param.dtype:
                    mark = mark_for(g.bucket.params[index])
                param.grad = mark
            self._dirty = True
            self._settled = False
            self.plain |= not self.guided
            if torch.is_grad_enabled():  # backward(create_graph=True)
                with torch.no_grad():
                    g.add(index, grad.detach(), self.scale, self._is_last())
            else:
                g.add(index, grad, self.scale, self._is_last())
            self._used.add(name)
            if g.complete():
                if not self._order_agreed and position not in self._finished:
                    self._finished.append(position)
                self._launch_ready()

        return on_gradient

    def _is_last(self) -> bool:
        """The reduction of what is added now follows before other micro-batches are added."""
        return self.synchronize

    def _may_launch(self, g: BucketGradients) -> bool:
        return self.synchronize or g.bucket.policy.shard_grads

    def _launch_ready(self) -> None:
        while self._next < len(self._order):
            g = self.gradients[self._order[self._next]]
            if not (g.complete() and self._may_launch(g)):
                return
            self._launch(g)

    def _launch(self, g: BucketGradients) -> None:
        self._next += 1
        g.launch()
        self._launched.append(g)
        while self._launched and self._launched[0].done():
            self._launched.pop(0).wait()
        if self._patient and not (g.whole or g.replicated) and len(self._launched) > IN_FLIGHT:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Bounds the memory of buffers in flight, unless a peer needs us to go on first."""
        oldest, start = self._launched[0], time.monotonic()
        while not oldest.done():
            if time.monotonic() > start + _PATIENCE:
                self._patient = False
                break
            time.sleep(_POLL)
        oldest.polled(time.monotonic() - start)
        if self._patient:
            self._launched.pop(0).wait()

    # --- at the end of a micro-batch and of a step ------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Micro-batches have run since the last step."""
        return self._dirty or self._backwards > 0

    def mark_backward(self) -> None:
        """A backward belongs to the running micro-batch, even if it reaches no parameter."""
        self._dirty = True
        self._settled = False

    def next_micro_batch(self) -> None:
        """Ends the running micro-batch, if it had a backward: launches the sharded buckets that did not complete, and
        allows every bucket one more launch. Collective. Contributions that came after a launch wait for `finish`."""
        if not self._dirty:
            return
        self._flush()
        self._end_micro_batch()

    def _flush(self) -> None:
        while self._next < len(self._order):
            g = self.gradients[self._order[self._next]]
            if self._may_launch(g):
                self._launch(g)
            else:
                self._next += 1

    def _end_micro_batch(self) -> None:
        self._next = 0
        self._backwards += int(self._dirty)
        self._dirty = False
        if any(g.replicated for g in self._launched):  # every rank is here: the second level of the sum can be made
            self._wait_for_all()
        for g in self.gradients:
            g.restart()

    def _wait_for_all(self) -> None:
        for g in self._launched:
            g.wait()
        self._launched.clear()

    def finish(self, marks: Sequence[int] = ()) -> tuple[frozenset[str], list[int]]:
        """Completes the step's reductions. Returns the names of the parameters that got a gradient on some rank, and the
        largest of the ranks' `marks` (any facts to be agreed on, equally many on all ranks). Collective."""
        self._check_marks()
        self.synchronize = True
        if not self._settled:
            self._flush()
            self._end_micro_batch()
        self._settled = True
        late = [int(g.pending) for g in self.gradients]
        used = [int(n in self._used) for n in self._names]
        facts = torch.tensor([self._backwards, -self._backwards, *late, *used, *marks], dtype=torch.int32)
        self._control.all_reduce(facts, "micro-batches and used parameters of the step", op="max").wait()
        most, least, *flags = facts.tolist()
        self._check_counts(most, -least)
        for position in self._order:
            if flags[position]:  # contributions after the launch, on some rank
                self.gradients[position].launch()
                self._launched.append(self.gradients[position])
        self._wait_for_all()
        for stream in self._unchecked:
            stream.verify_order(self._control)
        works = [g.spread() for g in self.gradients]
        for work in works:
            if work is not None:
                work.wait()
        self._agree_on_order()
        flags = flags[len(self.gradients) :]
        names = frozenset(n for n, flag in zip(self._names, flags[: len(used)], strict=True) if flag)
        return names, flags[len(used) :]

    def forget(self) -> None:
        """Drops the gradients of a step that is given up. Collective if a backward ran: one rank may have launched what
        another still has to."""
        if self._dirty:
            self._flush()
        self.clear()

    def clear(self) -> None:
        """Begins a new step. Only when all ranks have launched the same."""
        for g in self.gradients:
            g.clear()
        self._launched.clear()
        self._unmark_all()
        self._used.clear()
        self.plain = False
        self._next, self._backwards, self._dirty, self._patient, self._settled = 0, 0, False, True, False

    def count_as_used(self, bucket: Bucket, index: int) -> None:
        """Parameter `index` of `bucket` was given a gradient by hand, after `finish`."""
        self._used.add(bucket.layout.specs[index].name)
        with torch._C.DisableTorchFunctionSubclass():
            if bucket.params[index].grad is None:
                bucket.params[index].grad = mark_for(bucket.params[index])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _check_marks(self) -> None:
        """`.grad` is what the engine left there; whatever else the user put there would have no effect."""
        with torch._C.DisableTorchFunctionSubclass():
            for g in self.gradients:
                for p, spec in zip(g.bucket.params, g.bucket.layout.specs, strict=True):
                    if p.grad is None:
                        if spec.name in self._used:
                            raise ModelError(
                                f"`.grad` of parameter '{spec.name}' was set to None after backward (module.zero_grad()?), but "
                                "the engine holds the gradient and would apply it; to forget the gradients of a step call "
                                "engine.zero_grad() or optimizer.zero_grad() of the engine's optimizer"
                            )
                    elif type(p.grad) is not MovedGradient:
                        raise ModelError(
                            f"`.grad` of parameter '{spec.name}' was assigned, which has no effect: the engine sums gradients in "
                            "its buckets; set it with zeroengine.utils.safe_set_full_grad(param, value) after backward, or "
                            "change it in a hook (param.register_hook)"
                        )

    def _unmark_all(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for g in self.gradients:
                for p, spec in zip(g.bucket.params, g.bucket.layout.specs, strict=True):
                    if spec.name in self._used and type(p.grad) is MovedGradient:
                        p.grad = None

    def _check_counts(self, most: int, least: int) -> None:
        if most == least:
            return
        counts = self._control.exchange(torch.tensor([self._backwards]), "micro-batches of the step").flatten().tolist()
        by_count: dict[int, list[int]] = {}
        for r, n in zip(self._control.ranks, counts, strict=True):
            by_count.setdefault(int(n), []).append(r)
        told = ", ".join(f"{n} on rank{'s' * (len(r) > 1)} {_ranges(r)}" for n, r in sorted(by_count.items()))
        raise DivergenceError(
            f"rank {self._control.ranks[self._control.rank]}: the ranks ran different numbers of micro-batches (backward "
            f"calls) before this step ({told}); give every rank the same number, or end the epoch on all ranks together"
        )

    def _agree_on_order(self) -> None:
        """After the first step, buckets are launched in the order in which backward really completes them on rank 0."""
        if self._order_agreed:
            return
        self._order_agreed = True
        rest = [i for i in self._order if i not in self._finished]
        order = torch.tensor(self._finished + rest, dtype=torch.int64)
        if order.numel():
            self._control.broadcast(order, 0, "order of gradient buckets").wait()
        self._order = [int(i) for i in order]


def _unmark(param: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that runs before autograd adds to `.grad`, which must not find the mark there."""

    def before(_: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if type(param.grad) is MovedGradient:
                param.grad = None

    return before


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and runs[-1][1] == r - 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
