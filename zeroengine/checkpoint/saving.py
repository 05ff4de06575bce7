"""Saving: pieces of named tensors and the Python values that belong to them, as one complete folder or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zeroengine import __version__
from zeroengine.checkpoint import folder as folders
from zeroengine.checkpoint.ranks import Ranks
from zeroengine.checkpoint.sharded import ShardedTensorView
from zeroengine.checkpoint.storage import FileSum, SummingWriter, write_file
from zeroengine.checkpoint.values import pack
from zeroengine.errors import CheckpointError
from zeroengine.logging import log_rank0, logger
from zeroengine.wording import listed
from zeroengine.zero.layout import Piece


def save(
    folder: Path,
    tensors: Mapping[str, Sequence[Piece]],
    replicated: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    *,
    process_group: ProcessGroup | None,
    rank: int,
    world: int,
    latest: bool = True,
    keep_last: int | None = None,
) -> None:
    """Saves a complete checkpoint as `folder`, i.e. `<directory>/<tag>`, or leaves everything as it was. Collective.

    `tensors` maps keys such as "model.<param>" or "optim.<param>.exp_avg" to the pieces of that tensor that this rank
    holds: none, some or all. Together the ranks must cover each tensor; a piece that several ranks hold alike is
    written by one of them. `replicated` are Python values equal on all ranks, of which rank 0's are written;
    `per_rank` are this rank's own. With `latest`, the checkpoint becomes the one to resume from. An existing
    checkpoint of this name is replaced. With `keep_last`, older complete checkpoints of the directory are removed once this
    one is durable, so that `keep_last` are left.

    `rank` and `world` are those within `process_group`, a group on the CPU (None: the default group, or one process).
    The tensors can be read without zeroengine: `torch.distributed.checkpoint.load(state, checkpoint_id=folder)`.

    Raises CheckpointError on all ranks if any rank cannot do its part, and RankError if one has died. The previous
    checkpoint is then still loadable and the caller may go on.
    """
    saver = Saver(Path(folder), Ranks(process_group, rank, world), latest=latest, keep_last=keep_last)
    saver.prepare(tensors, replicated, per_rank)
    saver.run()


class Saver:
    """One save, phase by phase; every phase ends on all ranks together. See `save`."""

    def __init__(self, final: Path, ranks: Ranks, *, latest: bool, keep_last: int | None) -> None:
        self.final, self.ranks, self.latest, self.keep_last = final.absolute(), ranks, latest, keep_last
        self.doing = f"saving {self.final}"
        self.saving = self.final
        self.keys: list[str] = []
        self.views: dict[str, ShardedTensorView] = {}
        self.values: dict[str, bytes] = {}  # by the name of their file
        self.sums: dict[str, FileSum] = {}

    def prepare(self, tensors: Mapping[str, Sequence[Piece]], replicated: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
        """Everything that can go wrong before a byte is written."""

        def work() -> str:
            folders.check_tag(self.final.name)
            if self.keep_last is not None and self.keep_last < 1:
                raise CheckpointError(f"keep_last is {self.keep_last}: at least the new checkpoint is kept (None keeps all)")
            self.keys = list(tensors)
            self.views = {key: ShardedTensorView.of_pieces(key, pieces) for key, pieces in tensors.items() if pieces}
            self.values = {folders.rank_file(self.ranks.rank): self._pack(per_rank, "per_rank")}
            if self.ranks.rank == 0:
                self.values[folders.REPLICATED] = self._pack(replicated, "replicated")
            return self.final.name

        tags = self.ranks.phase(self.doing, work)
        if len(set(tags)) > 1:
            told = ", ".join(f"rank {r}: {tag}" for r, tag in enumerate(tags))
            raise CheckpointError(f"{self.doing}: the ranks save under different tags ({told}); give the same one on every rank")

    def _pack(self, values: Mapping[str, Any], what: str) -> bytes:
        data, pickled = pack(values, what)
        if pickled:
            log_rank0(
                f"{self.doing}: {what} {sorted(pickled)} hold objects beyond numbers, strings, containers and "
                "tensors; they are stored as pickles, which load only with allow_pickle=True"
            )
        return data

    def run(self) -> None:
        """Writes what `prepare` took."""
        self.begin()
        try:
            self.write()
            self.commit()
        except BaseException:
            if self.ranks.rank == 0:  # all ranks have left the phase that failed: nobody writes any more
                folders.discard(self.saving)
            raise

    def forget(self) -> None:
        """Lets go of the tensors that `prepare` was given."""
        self.views = {}

    def begin(self) -> None:
        name = self.ranks.on_rank0(self.doing, lambda: folders.begin(self.final).name)
        self.saving = self.final.parent / name

        def visible() -> None:
            if not self.saving.is_dir():
                raise CheckpointError(
                    f"{self.saving}, made by rank 0, is not visible here: the checkpoint directory must be on a "
                    "file system that all nodes share"
                )

        try:
            self.ranks.phase(self.doing, visible)
        except BaseException:
            if self.ranks.rank == 0:
                folders.discard(self.saving)
            raise

    def write(self) -> None:
        writer = SummingWriter(self.saving)
        try:
            metadata = self.ranks.torch_phase(
                self.doing,
                lambda: dcp.save(dict(self.views), storage_writer=writer, **self.ranks.torch_arguments()),
            )
        finally:
            writer.close()

        def work() -> dict[str, FileSum]:
            self._check_cover(metadata)
            return writer.sums | {name: write_file(self.saving / name, data) for name, data in self.values.items()}

        for sums in self.ranks.phase(self.doing, work):
            self.sums |= sums

    def _check_cover(self, metadata: Metadata) -> None:
        """torch checks the cover only from two ranks on, and cannot see a tensor of which no rank gave a piece."""
        lost = [key for key in self.keys if key not in metadata.state_dict_metadata]
        for key in self.views:
            saved = metadata.state_dict_metadata.get(key)
            if isinstance(saved, TensorStorageMetadata):
                if sum(math.prod(chunk.sizes) for chunk in saved.chunks) != math.prod(saved.size):
                    lost.append(key)
        if lost:
            raise CheckpointError(f"the ranks' pieces do not cover these tensors: {listed(lost, folders.SHOWN)}")

    def commit(self) -> None:
        def work() -> None:
            marker = folders.Marker(
                format=folders.FORMAT,
                world=self.ranks.world,
                saved_at=folders.now(),
                torch=str(torch.__version__),
                zeroengine=__version__,
                files=self.sums,
            )
            folders.commit(self.saving, self.final, marker, latest=self.latest)
            if self.keep_last is not None:
                folders.prune(self.final.parent, self.keep_last, self.final.name)

        self.ranks.on_rank0(self.doing, work)
        if self.ranks.rank == 0:
            size = sum(size for size, _ in self.sums.values())
            logger.info("saved %s: %.1f MB in %d files", self.final, size / 1e6, len(self.sums))
