"""Gradients of one bucket: where they are added up while backward runs, and this rank's reduced part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroengine.comm.listening import Watched
from zeroengine.comm.protocol import Communicator, Work
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.pool import BufferPool, unseen


@dataclass(frozen=True)
class GradientRule:
    """How gradients are combined. `accumulate`: dtype of buffers and of the sum over micro-batches and ranks;
    `wire`: dtype that travels; `before`: factor on every contribution; `scale`: factor on the sum over ranks. Their
    product is 1/ranks for the mean."""

    accumulate: torch.dtype
    wire: torch.dtype
    scale: float
    before: float = 1.0


@dataclass(frozen=True)
class _Launch:
    """A reduction under way. `buffer` returns to the pool; `part` is this shard group's sum when replicas follow."""

    work: Work
    buffer: Tensor | None
    part: Tensor | None
    accumulate: bool


class BucketGradients:
    """A life cycle per optimizer step: `add` parameters' gradients, `launch` the reduction, `wait`, read `reduced`, `clear`.

    The flat buffer lives only from the first gradient of the bucket to its reduction, and `reduced` is this rank's slice,
    which lives until `clear`: it lies where activations lay, whose backward is over, and the next forward's lie where it
    lay. Where gradients are kept whole (all of them are updated here, or several micro-batches are added up before the
    reduction), one flat buffer lives on from step to step and is reduced in place. Contributions after a launch (a
    second backward, a parameter used in two checkpointed segments) open another buffer, and another launch adds its
    reduction: reduction is linear.
    """

    def __init__(self, bucket: Bucket, rule: GradientRule, shard_comm: Communicator, replica_comm: Communicator, pool: BufferPool) -> None:
        self.bucket = bucket
        self.rule = rule
        self._comm = shard_comm
        self._replicas = replica_comm
        self._pool = pool
        self._home: Tensor | None = None  # the flat buffer that lives on, where gradients are kept whole
        self._home_views: list[Tensor] = []  # the parameters' places in it
        self._open: Tensor | None = None  # where gradients are added now
        self._fired = [0] * len(bucket.params)  # contributions in the open buffer
        self._seen: set[int] = set()  # parameters that contributed in the running backward
        self._slice: Tensor | None = None  # the reduced part, elsewhere
        self._held = 0  # bytes of it in the last step
        self._filled = False  # `reduced` has a result of this step
        self._flying: list[_Launch] = []

    # --- adding ---------------------------------------------------------------------------------------------------

    def add(self, index: int, grad: Tensor, alpha: float, last: bool = True) -> None:
        """Adds alpha * grad of parameter `index`. `last`: the reduction follows, before other micro-batches are added."""
        alpha *= self.rule.before
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        buffer = self._opened(last)
        if buffer is self._home:
            target = self._home_views[index]
        else:
            spec = self.bucket.layout.specs[index]
            target = buffer[spec.offset : spec.end].view(spec.shape)
        if self._fired[index]:
            target.add_(grad, alpha=alpha)
        elif alpha == 1.0:
            target.copy_(grad)
        elif grad.dtype is target.dtype:
            torch.mul(grad, alpha, out=target)
        else:  # a product in the gradient's own type would round before it widens
            target.copy_(grad).mul_(alpha)
        self._fired[index] += 1
        self._seen.add(index)

    def complete(self) -> bool:
        """Every parameter has contributed in the running backward."""
        return len(self._seen) == len(self._fired)

    def restart(self) -> None:
        """Another backward begins."""
        self._seen.clear()

    @property
    def replicated(self) -> bool:
        """The reduction goes on over replicas of this shard group."""
        return self._replicas.size > 1

    @property
    def pending(self) -> bool:
        """There are gradients that no launch has taken."""
        return any(self._fired)

    @property
    def whole(self) -> bool:
        """They are kept whole in this step."""
        return self._home is not None

    def _opened(self, last: bool = True) -> Tensor:
        if self._open is None:
            if self._keeps_whole(last):
                self._open = self._at_home()
            else:
                self._open = self._pool.take(self.bucket.layout.padded, self.rule.accumulate, self.bucket.device)
        return self._open

    def _keeps_whole(self, last: bool) -> bool:
        if self._filled:
            return False
        return self.whole or not self.bucket.policy.slices_gradients(self.bucket.layout.shards, last=last)

    def _at_home(self) -> Tensor:
        if self._home is None:
            layout, device = self.bucket.layout, self.bucket.device
            like = torch.empty(0, dtype=self.rule.accumulate, device=device)
            self._home = self._comm.empty(layout.padded, like)
            self._home_views = self.bucket.views(self._home)
        return self._home

    # --- reducing -------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Issues the reduction of the open buffer; parameters that did not contribute count as zero."""
        buffer = self._opened()
        for spec, fired in zip(self.bucket.layout.specs, self._fired, strict=True):
            if not fired:
                buffer[spec.offset : spec.end].zero_()
        buffer[self.bucket.layout.numel :].zero_()
        self._open, self._fired = None, [0] * len(self._fired)
        self._seen.clear()
        wire = buffer if self.rule.wire is self.rule.accumulate else buffer.to(self.rule.wire)
        free = None if buffer is self._home else buffer
        target, subject, scale = self._target(), self.bucket.subject, self.rule.scale
        part = torch.empty_like(target) if self.replicated else None
        if part is None:
            work = self._comm.reduce_scatter(target, wire, subject, scale=scale, accumulate=self._filled)
        else:
            work = self._comm.reduce_scatter(part, wire, subject)
        self._flying.append(_Launch(work, free, part, self._filled))
        self._filled = True

    def wait(self) -> None:
        """Completes all launches. Afterwards `reduced` holds the combined gradients of the step so far.

        With replicas of shards this is where their sum is made: a collective, in the common order of buckets.
        """
        while self._flying:
            launch = self._flying.pop(0)
            launch.work.wait()
            if launch.part is not None:
                self._replicas.all_reduce(launch.part, self.bucket.subject, scale=self.rule.scale).wait()
                if launch.accumulate:
                    self._target().add_(launch.part)
                else:
                    self._target().copy_(launch.part)
            if launch.buffer is not None:
                self._pool.give(launch.buffer)

    def done(self) -> bool:
        """`wait` would not block, and may be called whenever this rank likes: with replicas it is collective."""
        return not self.replicated and all(launch.work.done() for launch in self._flying)

    def polled(self, seconds: float) -> None:
        """This rank did nothing else for so long but ask for the oldest launch."""
        work = self._flying[0].work if self._flying else None
        if isinstance(work, Watched):
            work.polled(seconds)

    @property
    def streams(self) -> tuple[Communicator, Communicator]:
        """What reduces over the shard group, and over its replicas."""
        return self._comm, self._replicas

    def spread(self) -> Work | None:
        """Where gradients are kept whole and every rank updates everything: brings the other slices."""
        if self.bucket.policy.shard_state or self._home is None:
            return None
        return self._comm.all_gather(self._home, self._home[self.bucket.own], self.bucket.subject)

    def _target(self) -> Tensor:
        if self._home is not None:
            return self._home[self.bucket.own]
        if self._slice is None:
            self._slice = unseen(self.bucket.layout.shard_numel, self.rule.accumulate, self.bucket.device)
        return self._slice

    # --- results --------------------------------------------------------------------------------------------------

    @property
    def reduced(self) -> Tensor:
        """This rank's slice of the combined gradients (elements `bucket.own`)."""
        return self._target()

    @property
    def updated(self) -> Tensor:
        """Gradients of the range that this rank's optimizer updates: everything, or the slice."""
        return self.reduced if self.bucket.policy.shard_state or self._home is None else self._home

    def clear(self) -> None:
        """Forgets the step's gradients; a buffer that lives on is kept."""
        self.wait()
        if self._open is not None and self._open is not self._home:
            self._pool.give(self._open)
        self._held = self.bytes()
        self._open = self._slice = None
        self._filled = False
        self._fired = [0] * len(self._fired)
        self._seen.clear()

    def free(self) -> None:
        """Gives up the buffer that lives on between steps; the next step makes it again."""
        self._home = self._slice = None
        self._home_views = []
        self._held = 0

    def bytes(self) -> int:
        """Bytes of what is reduced, or will be in place. Between steps those of the last one, whose memory other tensors of the
        step have meanwhile."""
        return sum(t.nbytes for t in (self._home, self._slice) if t is not None) or self._held
