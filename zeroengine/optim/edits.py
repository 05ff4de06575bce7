"""What somebody else wrote into parameters between two steps: agreed on by the ranks, and followed by the masters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroengine.comm.alike import differ, odd_ranks
from zeroengine.comm.protocol import Communicator
from zeroengine.errors import DivergenceError
from zeroengine.optim.update import FlatMaster
from zeroengine.zero.bucket import Bucket
from zeroengine.zero.edits import digest


class MasterEdits:
    """Edits of the values of `buckets`, and the `masters` of those that are updated. `control`: the ranks that train together."""

    def __init__(self, buckets: Sequence[Bucket], masters: Sequence[FlatMaster], control: Communicator) -> None:
        self._buckets, self._masters, self._control = buckets, masters, control

    def marks(self) -> list[int]:
        """For each bucket, whether its values were written by somebody else on this rank since the last step."""
        drifted = {id(m.bucket) for m in self._masters if m.drifted()}
        return [int(b.edit != 0 or b.written() or id(b) in drifted) for b in self._buckets]

    def follow(self, marks: Sequence[int]) -> None:
        """Edits that all ranks made alike become the truth, masters included. `marks`: the largest of all ranks'. Collective if any
        is set. Raises `DivergenceError` on all ranks for edits that were not made alike."""
        edited = [b for b, mark in zip(self._buckets, marks, strict=True) if mark]
        if not edited:
            return
        mine = [b.edit if b.policy.shard_params or b.full is None else digest(b.full) for b in edited]
        table = self._control.exchange(torch.tensor(mine, dtype=torch.int64), "edits of parameters")
        for bucket, column in zip(edited, table.unbind(1), strict=True):
            ranks = bucket.holders.ranks
            odd = odd_ranks([int(column[self._control.ranks.index(r)]) for r in ranks], ranks)
            if odd:
                raise DivergenceError(
                    f"rank {self._control.ranks[self._control.rank]}: parameters of {bucket.subject} were edited in place "
                    "(load_state_dict, copy_, a write in forward) since the last step, and not alike on all ranks "
                    f"({differ(odd, ranks)}); make the same edit everywhere, or edit inside "
                    f"zeroengine.zero.GatheredParameters(..., modifier_rank={ranks[0]})"
                )
            bucket.forget_edit()
            self.refresh(bucket)

    def follow_now(self) -> None:
        """Agrees on what was written since the last step, and follows it. Collective."""
        marks = torch.tensor(self.marks(), dtype=torch.int32)
        self._control.all_reduce(marks, "edited parameters", op="max").wait()
        self.follow(marks.tolist())

    def refresh(self, bucket: Bucket) -> None:
        """The masters of `bucket` follow its values."""
        for master in self._masters:
            if master.bucket is bucket:
                master.refresh()
