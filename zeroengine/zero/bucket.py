"""A bucket: parameters laid into one flat buffer, this rank's slice of it, and who holds the values now."""

from __future__ import annotations

import bisect
import enum
import re

import torch
from torch import Tensor, nn

from zeroengine.comm.protocol import Work
from zeroengine.errors import DivergenceError, ModelError, OffloadError
from zeroengine.offload.home import Home, Memory, at_hand
from zeroengine.offload.placement import Placement
from zeroengine.zero.edits import digest, same_bits
from zeroengine.zero.holders import Holders
from zeroengine.zero.layout import BucketLayout
from zeroengine.zero.policy import Policy
from zeroengine.zero.pool import BufferPool
from zeroengine.zero.residency import Slot, hide, show


class Residency(enum.Enum):
    RELEASED = "released"  # only `shard` exists
    GATHERING = "gathering"  # an all-gather into `full` was issued
    WHOLE = "whole"  # parameters are views into `full`


class Bucket:
    """Parameters of one dtype under one `Policy`.

    `full` has `layout.padded` elements while values are whole, else None. `shard` is this rank's slice: a view into
    `full` where the policy keeps values whole, else the only copy, which lives where `placement` says: it is read and written
    inside `at_hand(bucket.home)` only. `pins` counts the users that forbid releasing;
    `version` the updates of the values, so that backward notices weights that changed since forward.

    Users may write into parameters. torch counts such writes in `_version`, which is compared at release, so that a write
    into gathered values reaches the shard. `edit` is a digest of what was written since the last step (0: nothing); it
    is part of the subject of the next gather, so that ranks that wrote different values never use them.
    """

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        params: list[nn.Parameter],
        dtype: torch.dtype,
        policy: Policy,
        holders: Holders,
        pool: BufferPool,
        placement: Placement | None = None,
    ) -> None:
        self.index = index
        self.layout = layout
        self.params = params
        self.dtype = dtype
        self.device = params[0].device
        self.policy = policy
        self.trainable = params[0].requires_grad
        self.full: Tensor | None = None
        self.shard: Tensor = torch.empty(0, dtype=dtype, device=self.device)
        self.residency = Residency.RELEASED
        self.pins = 0
        self.version = 0
        self.edit = 0
        self.holders = holders
        self.comm = holders.params
        self.home: Home = Memory()
        self.placement = placement or Placement.on_device(self.device)
        self._pool = pool
        self._work: Work | None = None
        self._lent = False  # the gather that was issued reads the shard
        self._unread: OffloadError | None = None
        self._written: list[int] = []
        self._uses = 0
        self._offsets = [spec.offset for spec in layout.specs]
        names = [spec.name for spec in layout.specs]
        self.subject = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} parameters)"
        for i, (p, spec) in enumerate(zip(params, layout.specs, strict=True)):
            p._zero = Slot(spec.name, self, i, type(p))  # type: ignore[attr-defined]

    @property
    def own(self) -> slice:
        """This rank's slice of the flat buffer."""
        return slice(*self.layout.slice_of(self.comm.rank))

    def adopt(self, full: Tensor) -> None:
        """Takes the initial values: `full` is flat, padded, equal on all ranks, of the bucket's dtype or one that is cast.
        Of the bucket's dtype and where the policy keeps values whole it becomes the bucket's own, and should be memory of
        the communicator."""
        like = full.new_empty(0, dtype=self.dtype)
        if self.policy.shard_params:
            shard = self.comm.empty(self.layout.shard_numel, like).copy_(full[self.own])
            self.shard, self.home = self.placement.values(self.subject, shard, lambda: [self.shard])
            with self.placement.faults.kept(), at_hand(self.home, changed=True):
                pass  # out of memory, if it does not live there
            hide(self.params)
        else:
            self.full = full if full.dtype is self.dtype else self.comm.empty(full.numel(), like).copy_(full)
            self.shard = self.full[self.own]
            self._show()
        self.forget_edit()

    def gather(self) -> None:
        """Issues the all-gather if the values are released."""
        if self.residency is Residency.RELEASED:
            self.full = self._pool.take(self.layout.padded, self.dtype, self.device)
            told = f" (edited in place since the last step: {self.edit:x})" if self.edit else ""
            try:
                self.home.bring()
                self._lent, shard = True, self.placement.link.lend(self.shard)
            except OffloadError as error:
                shard = self.full.new_zeros(self.layout.shard_numel)
                if self.placement.goes_on:
                    self.placement.faults.keep(error)
                else:
                    # The others must hear of it: another subject than theirs ends the gather on all ranks.
                    self._unread = error
                    told = f" <{str(error)[:_TOLD]}> {_UNREAD}"
            self.residency = Residency.GATHERING
            try:
                self._work = self.comm.all_gather(self.full, shard, self.subject + told)
            except DivergenceError as error:  # of an operation before this one
                told_of = self._told(error)
                self._return()
                raise told_of from error

    def publish(self) -> None:
        """The slices changed: issues the all-gather of values that are kept whole; a sharded bucket only counts the change."""
        self.count_update()
        if self.full is not None and not self.policy.shard_params:
            self._work = self.comm.all_gather(self.full, self.shard, self.subject)

    def count_update(self) -> None:
        """The values are others from now on. Autograd refuses to run backward through a graph that was made before, as it
        does after an in-place update by any optimizer: it compares the versions of the parameters themselves."""
        self.version += 1
        if self.full is not None and not self.policy.shard_params:
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(self.params)
            self._written = [version + 1 for version in self._written]

    def wait(self) -> None:
        """Completes what was issued; afterwards parameters of a gathered bucket have their values."""
        self._end_work()
        if self.residency is Residency.GATHERING:
            self._show()

    def release(self) -> None:
        """Drops the whole values. Views that somebody else still holds stay valid: nothing is resized."""
        if not self.policy.shard_params or self.residency is Residency.RELEASED:
            return
        self._end_work()
        full, was_shown = self.full, self.residency is Residency.WHOLE
        self.full, self.residency = None, Residency.RELEASED
        if was_shown:
            hide(self.params)
        if full is None:
            return
        if was_shown and self.written():
            self.store(full)
            self.note_edit(digest(full))
        elif was_shown and self.placement.faults.first is None:
            self._check_kept(full)
        self._pool.give(full)

    def _end_work(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
            if self._unread is not None:  # there is no other rank
                raise self._unread
        except DivergenceError as error:
            raise self._told(error) from error
        finally:
            self._return()

    def _return(self) -> None:
        """The gather does not read the shard any more."""
        lent, self._lent, self._unread = self._lent, False, None
        if lent:
            self.home.put(changed=False)

    def _told(self, error: DivergenceError) -> Exception:
        """What a divergence means here."""
        if self._unread is not None:
            return self._unread
        told = re.search(f"<([^<>]*)> {re.escape(_UNREAD)}", str(error))
        if told is not None:
            return OffloadError(f"{self.subject}: another rank could not read its values: {told.group(1)}")
        if self.residency is Residency.GATHERING:
            return DivergenceError(f"{str(error).rstrip('.')}. {_REMEDY}")
        return DivergenceError(str(error))

    # --- edits by the user ----------------------------------------------------------------------------------------

    def written(self) -> bool:
        """Somebody wrote into a parameter in place since `forget_edit` or `note_edit`."""
        return self._written != self._versions()

    def version_of(self, offset: int) -> tuple[int, int]:
        """Version of the values at `offset` of the flat buffer: updates of the bucket, writes into the parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.version, self.params[bisect.bisect_right(self._offsets, offset) - 1]._version

    def note_edit(self, values: int) -> None:
        """Values with this digest were written and are in the shards."""
        self.edit = hash((self.edit, values)) & _EDIT_MASK or 1
        self._written = self._versions()

    def forget_edit(self) -> None:
        """All ranks agree on the values as they are."""
        self.edit = 0
        self._written = self._versions()

    def write(self, index: int, values: Tensor) -> None:
        """Parameter `index` of a released bucket becomes `values` (its whole shape, equal on all ranks): each rank keeps its
        part of them."""
        spec = self.layout.specs[index]
        flat = values.detach().to(device=self.device, dtype=self.dtype).expand(spec.shape).reshape(-1)
        lo, hi = max(self.own.start, spec.offset), min(self.own.stop, spec.end)
        if lo < hi:
            with at_hand(self.home, changed=True):
                self.shard[lo - self.own.start : hi - self.own.start].copy_(flat[lo - spec.offset : hi - spec.offset])
        self.version += 1
        self.note_edit(hash((index, digest(flat))))

    def _versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [p._version for p in self.params]

    def _check_kept(self, full: Tensor) -> None:
        """Writes through `.data` are not counted by torch; looked for in every so many releases, they do not stay unseen."""
        self._uses += 1
        if self._uses % _CHECK_EVERY != 1:
            return
        try:
            kept = self.keeps(full)
        except OffloadError as error:
            if not self.placement.goes_on:
                raise
            self.placement.faults.keep(error)
            return
        if not kept:
            raise ModelError(
                f"rank {self.comm.ranks[self.comm.rank]}: values of {self.subject} were changed through `.data` (or a view of "
                "it) while they were gathered for a forward or backward, and such a change is lost when they are released; write "
                "into the parameter itself under torch.no_grad(), use an out-of-place operation, or edit between steps inside "
                "zeroengine.zero.GatheredParameters"
            )

    def keeps(self, full: Tensor) -> bool:
        """This rank's slice of `full` is the shard, to the last bit."""
        with at_hand(self.home, changed=False):
            return same_bits(full[self.own].to(self.shard.device), self.shard)

    def store(self, full: Tensor) -> None:
        """This rank's slice of `full` becomes the shard."""
        with at_hand(self.home, changed=True):
            self.shard.copy_(full[self.own])

    def holds(self, index: int) -> bool:
        """Whether parameter `index` lies where the layout says, as far as values are whole between uses."""
        if self.policy.shard_params or self.full is None:
            return True
        at = self.full.data_ptr() + self.layout.specs[index].offset * self.full.element_size()
        return self.params[index].data_ptr() == at

    def views(self, flat: Tensor) -> list[Tensor]:
        """Tensors of the parameters' shapes in a flat buffer laid out like this bucket."""
        return [flat[s.offset : s.end].view(s.shape) for s in self.layout.specs]

    def detach(self) -> None:
        """Gives every parameter memory of its own again and forgets them (collective if values are sharded)."""
        self.gather()
        self.wait()
        if self.full is not None:
            for p, values in zip(self.params, self.views(self.full), strict=True):
                p.__class__ = p._zero.cls  # type: ignore[attr-defined]
                p.data = values.clone()
                del p._zero  # type: ignore[attr-defined]
        self.full = None
        self.home = Memory()
        self.shard = torch.empty(0, dtype=self.dtype)

    def _show(self) -> None:
        if self.full is not None:
            show(self.params, self.views(self.full))
        self.residency = Residency.WHOLE


_CHECK_EVERY = 16  # releases
_UNREAD = "(not read)"
_TOLD = 200  # characters of an error that fit into the subject of a gather
_EDIT_MASK = (1 << 48) - 1
_REMEDY = (
    "If the ranks run different parts of the model (experts, branches chosen by the data), make the module around them one "
    "gather unit before zeroengine.initialize: zeroengine.utils.set_z3_leaf_modules(model, [ItsClass]) or the key "
    "zero_optimization.leaf_module. If a parameter was edited in place, make the same edit on all ranks"
)
_ALIGN = 4  # a cut between blocks is taken once a bucket has 1/_ALIGN of the target


def block_prefix(name: str) -> str:
    """Path up to the first number ("h.3.attn.weight" -> "h.3"): parameters of one repeated block share it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def cut_into_buckets(named_sizes: list[tuple[str, int]], target: int) -> list[list[int]]:
    """Groups consecutive parameters (name, elements) into buckets of at most `target` elements (or one parameter),
    preferring the borders of repeated blocks. Returns index lists."""
    groups: list[list[int]] = []
    filled = 0
    for i, (name, size) in enumerate(named_sizes):
        new_block = i > 0 and block_prefix(name) != block_prefix(named_sizes[i - 1][0])
        if not groups or filled + size > target or (new_block and filled * _ALIGN >= target):
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += size
    return groups
