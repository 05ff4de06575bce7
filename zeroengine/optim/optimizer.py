"""The optimizer that the user gets: one whole update of the sharded model in `step`."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.comm.alike import first_difference
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError, DivergenceError, ModelError, OffloadError
from zeroengine.offload.placement import Placement
from zeroengine.ops.optimizer import FusedOptimizer
from zeroengine.optim.build import named_groups
from zeroengine.optim.clip import NormRule, OverShards, clip_factor
from zeroengine.optim.edits import MasterEdits
from zeroengine.optim.offloaded import AwayUpdate
from zeroengine.optim.options import OptionsDigest, option_lines
from zeroengine.optim.parts import Attached
from zeroengine.optim.scaler import LossScaler
from zeroengine.optim.skips import Skips
from zeroengine.optim.state import Held, NoChange
from zeroengine.optim.update import FlatMaster
from zeroengine.wording import listed
from zeroengine.zero.host import settle
from zeroengine.zero.layout import Piece
from zeroengine.zero.reducer import Reductions
from zeroengine.zero.sharder import Sharder

_SETTLING = 2  # steps after which holes in host memory are given back: the state is made in the first


@dataclass(frozen=True)
class StepResult:
    """What an update did: the norm of the combined gradients before clipping, and whether it was applied."""

    norm: float
    applied: bool
    clipped: bool


class ZeroOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer over this rank's parts. `param_groups` are the inner optimizer's own dicts, so a scheduler
    that was built on either object changes the learning rate of both.

    `step` completes the reductions, agrees on the norm, skips non-finite gradients on all ranks together, clips, updates
    the masters and brings the values to where the policy wants them.
    """

    def __init__(
        self,
        attached: Attached,
        reducer: Reductions,
        sharder: Sharder,
        control: Communicator,
        shard_ranks: tuple[int, ...],
        scaler: LossScaler,
        max_norm: float,
        max_skips: int,
        ignore_unused: bool = True,
        placement: Placement | None = None,
    ) -> None:
        # torch's own __init__ would build groups over parameters; the inner optimizer has done so.
        self._attached = attached
        self.optimizer = attached.inner
        self.parts = attached.parts
        self.masters: list[FlatMaster] = attached.parts.masters
        self.reducer = reducer
        self.scaler = scaler
        self.max_norm = max_norm
        self.last: StepResult | None = None
        self._sharder = sharder
        self._control = control
        self.skips = Skips(control, max_skips)
        self.edits = MasterEdits(sharder.buckets, self.masters, control)
        self._ignore_unused = ignore_unused
        self._settling = _SETTLING
        self._options = OptionsDigest()
        self.placement = placement or Placement.on_device(torch.device("cpu"))
        self.torn: str | None = None  # why weights and state are of different steps
        self.tokens: float | None = None  # of this rank's micro-batches, whose losses are sums over them; None: losses are means
        self.losses: list[Tensor] = []  # of this rank's micro-batches, as far as they are known: who is to blame for a skip
        self.readers: Callable[[], None] | None = None  # waits for those who still read the state
        self._away = AwayUpdate(self.placement, self.masters, self.optimizer, self.parts.whole)
        self._near = [m for m in self.masters if not m.away]
        self._away.settle()
        self.norm_rule: NormRule = OverShards(shard_ranks, control)  # another where ranks share layers, or stages an update
        sharder.on_edit = self.edits.refresh
        sharder.optimizer = self
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    # --- torch.optim.Optimizer ------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        self.settle()
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def overflow(self) -> bool:
        """The last step was skipped because of non-finite gradients."""
        return self.last is not None and not self.last.applied

    @property
    def control(self) -> Communicator:
        """The ranks that train together."""
        return self._control

    @property
    def skipped_steps(self) -> int:
        """Steps that were not applied, since the beginning of the run."""
        return self.skips.total

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.skips.total = count

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    @property
    def cur_scale(self) -> float:
        return self.scaler.scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the step so far. Collective if there are any."""
        self.forget_losses()
        self.reducer.forget()

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's parts; of what lives on a disk, a copy. For a checkpoint that loads anywhere use
        `engine.save_checkpoint`."""
        self.placement.check_here()
        if not self.placement.stores:
            return self.optimizer.state_dict()
        with contextlib.ExitStack() as stack:
            for store in self.placement.stores:
                stack.enter_context(store.exposed(write=False))
            return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.placement.check_here()
        self.optimizer.load_state_dict(state_dict)
        self._away.put_away()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Trains parameters that are in no group so far: a dict with `params` and, if they differ, options. The same call on
        every rank. Raises `ConfigError` for parameters that were frozen or absent when the engine was made."""
        group = named_groups(param_group)[0]
        if not group["params"]:
            raise ConfigError("a parameter group to add holds no trainable parameter; unfreeze them first (requires_grad_())")
        self._attached.add_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """One update. Collective. `closure` is refused: gradients come from `engine.backward` or `loss.backward()`."""
        if closure is not None:
            raise ValueError("ZeroOptimizer.step takes no closure: gradients are reduced while backward runs, before the step")
        self.placement.check_here()
        self.check_untorn()
        self._sharder.verify()
        self._sharder.end_backward()
        self._before_update()
        options = self._options.of(self.param_groups)
        used, marks = self.reducer.finish([*self.edits.marks(), options, -options])
        if marks[-2] != -marks[-1]:
            told = first_difference(option_lines(self.param_groups), self._control, "options of the optimizer")
            raise DivergenceError(f"{told}; {_OPTIONS_REMEDY}")
        self.edits.follow(marks[:-2])
        self._check_used(used)
        gradients = self.reducer.gradients
        share = self._share_of_tokens()
        norm = self.norm_rule.norm(gradients) * share
        finite = math.isfinite(norm)
        clipped, scale_helps = False, True
        if finite:
            factor = clip_factor(norm, self.max_norm)
            clipped = factor < 1.0
            self._update(used, factor * share)
            self.skips.applied()
        else:
            scale_helps = self._skip()
        if scale_helps:
            self.scaler.update(not finite)
        self.forget_losses()
        self.reducer.clear()
        self.last = StepResult(norm, finite, clipped)
        if self._settling:
            self._settling -= 1
            settle()
        return self.last

    # --- parts ----------------------------------------------------------------------------------------------------

    def check_untorn(self) -> None:
        """Raises `OffloadError` if an update was cut short by a disk."""
        if self.torn is not None:
            raise OffloadError(
                f"weights and optimizer state are of different steps, because an update was cut short ({self.torn}); load the last "
                "checkpoint before going on"
            )

    def forget_losses(self) -> None:
        """What was noted of the losses of a step."""
        self.tokens, self.losses = None, []

    def _share_of_tokens(self) -> float:
        """Factor that makes the gradients, which are means over ranks of summed losses, means over all tokens of the step; 1.0
        where losses are means already. Collective if any rank counts tokens."""
        if self.tokens is None:
            return 1.0
        mine = torch.tensor([self.tokens], dtype=torch.float64)
        total = float(self._control.exchange(mine, "tokens of the step").sum())
        if not total > 0:
            return 1.0  # no token anywhere: the gradients are zeros
        rule = self.reducer.gradients[0].rule
        return 1.0 / (rule.before * rule.scale * total)

    def _before_update(self) -> None:
        """What lives on a disk is on its way while the last gradients are reduced. Nothing has changed yet if a disk is gone."""
        if not self.placement.uses_disk:
            return
        with self.placement.faults.kept():
            for store in self.placement.stores:
                store.check()
            self._away.ahead()
        self.placement.agree(self._control, "before the update", "Nothing was changed")

    def settle(self) -> None:
        """Returns when nobody reads the optimizer's state any more (a save in the background copies it): it may change."""
        if self.readers is not None:
            self.readers()

    def _update(self, used: frozenset[str], factor: float) -> None:
        self.settle()
        fused = isinstance(self.optimizer, FusedOptimizer)
        if isinstance(self.optimizer, FusedOptimizer):
            grads: dict[Tensor, Tensor] = {}
            copies: dict[Tensor, Tensor] = {}
            for master in self._near:
                master.feed(used, grads, copies)
            self.optimizer.step(grad_scale=factor, copies=copies, grads=grads)
        else:
            self._update_by_torch(used, factor)
        if self.parts.whole is None:
            self._publish_near(fused)
        self._away.run(used, factor)
        if self.parts.whole is not None:
            self.parts.whole.update(self.optimizer.step, used)
            self._publish_near(fused)
        self._away.finish()
        for master in self.masters:
            master.bucket.wait()
        try:
            self.placement.agree(self._control, "in the update", "Load the last checkpoint to go on")
        except OffloadError as error:
            self.torn = str(error)
            raise

    def _publish_near(self, written: bool) -> None:
        for master in self._near:
            master.publish(written)

    def _update_by_torch(self, used: frozenset[str], factor: float) -> None:
        for master in self._near:
            if factor != 1.0:
                master.gradients.updated.mul_(factor)
            master.link(used)
        if self._has_flat_parts():
            self.optimizer.step()
        for master in self._near:
            master.unlink()

    def _has_flat_parts(self) -> bool:
        """Else every call of the inner `step` is one for whole parameters: some optimizers count their calls."""
        return any(index not in m.apart for m in self._near for index in m.parts) or self.parts.whole is None

    def _skip(self) -> bool:
        """Counts a skipped step and says why. Returns whether another loss scale might have helped: not where a loss itself is at
        fault. Collective."""
        loss = self.skips.loss_at_fault(self.losses)
        cause = self.norm_rule.blame(self.reducer.gradients) or "a sum over gradients that overflowed"
        self.skips.count(cause if loss is None else f"{cause}; {loss}", self.scaler.scale)
        return loss is None

    def _check_used(self, used: frozenset[str]) -> None:
        if self._ignore_unused:
            return
        unused = [s.name for m in self.masters for s in m.bucket.layout.specs if s.name not in used]
        if unused:
            raise ModelError(
                f"no rank had a gradient for {listed(unused)} in this step, and "
                "zero_optimization.ignore_unused_parameters is false; use these parameters in the loss, freeze them "
                "(requires_grad_(False)) before zeroengine.initialize, or set the key to true"
            )

    def follow_edits(self) -> None:
        """Makes the masters follow what was written into parameters since the last step. Collective."""
        self.edits.follow_now()

    def refresh_masters(self) -> None:
        """Makes fp32 masters follow the values (weights were loaded or edited without optimizer state)."""
        for master in self.masters:
            master.refresh()

    def pieces(self) -> Iterator[tuple[nn.Parameter, Piece]]:
        """This rank's parts of the masters, with the tensor that the inner optimizer knows them by."""
        for master in self.masters:
            yield from master.pieces()

    def held(self) -> Iterator[Held]:
        """What the inner optimizer keeps state for on this rank: parts of the masters, and whole parameters that this rank
        owns. The pieces' `data` has no values for the latter."""
        for master in self.masters:
            for index, parts in master.parts.items():
                if index not in master.apart:
                    for part in parts:
                        yield part.view, Piece(part.name, part.shape, part.start, part.view.data.view(-1))
        if self.parts.whole is not None:
            for view, spec in self.parts.whole.owned():
                yield view, Piece(spec.name, spec.shape, 0, torch.empty(0))

    def state_of(self, view: nn.Parameter) -> list[Tensor]:
        """What the inner optimizer keeps for a part or a whole parameter, step counts and the like aside."""
        return self._away.state(view)

    def make_state(self) -> None:
        """Lets the inner optimizer make the state that it lacks, by a step that changes nothing."""
        inner = self.optimizer
        mine = {id(p) for group in inner.param_groups for p in group["params"]}
        lacking = [p for master in self._near for p in master.views() if id(p) in mine and p not in inner.state]
        with torch.no_grad(), NoChange(inner):
            _rehearse(inner, lacking)
            for master in self._away.masters:
                with master.at_hand(changed=True):
                    _rehearse(inner, [p for p in master.views() if id(p) in mine and p not in inner.state])
            if self.parts.whole is not None:
                self.parts.whole.rehearse(inner.step, lambda p: p not in inner.state)

    def bytes(self) -> int:
        """Bytes in memory of masters that are separate from the values, and of optimizer state (its step counters aside)."""
        masters = sum(m.flat.nbytes for m in self.masters if m.separate)
        state = sum(v.nbytes for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim())
        return masters + state - self.placement.state_bytes_away()


_OPTIONS_REMEDY = (
    "set the options of the optimizer alike on all ranks (a schedule that follows the loss, such as ReduceLROnPlateau, needs the "
    "mean over ranks)"
)


def _rehearse(inner: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """A step of `inner` with zero gradients, for `params` only."""
    for p in params:
        p.grad = torch.zeros_like(p)
    if params:
        inner.step()
    for p in params:
        p.grad = None
