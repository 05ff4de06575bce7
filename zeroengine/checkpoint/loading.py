"""Loading: pieces of named tensors filled in place from a checkpoint of any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zeroengine.checkpoint import folder as folders
from zeroengine.checkpoint.ranks import Ranks
from zeroengine.checkpoint.sharded import ShardedTensorView
from zeroengine.checkpoint.storage import SafeReader, sum_of
from zeroengine.checkpoint.values import unpack
from zeroengine.errors import CheckpointError
from zeroengine.logging import log_rank0
from zeroengine.wording import listed
from zeroengine.zero.layout import Piece

Converted = dict[str, tuple[torch.dtype, torch.dtype]]


@dataclass(frozen=True)
class Loaded:
    """What `load` found beside the tensors that it filled in place; equal on all ranks but for `per_rank`.

    `per_rank` is None if another number of ranks saved the checkpoint, and `per_rank_note` then says so. `missing`
    are wanted keys that the checkpoint lacks, `unexpected` its keys that no rank wanted; both are empty after a
    strict load. `converted` maps keys to the (saved, wanted) floating dtypes where they differ. `world` is the number
    of ranks that saved.
    """

    folder: Path
    world: int
    replicated: dict[str, Any]
    per_rank: dict[str, Any] | None
    per_rank_note: str | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    converted: Converted


@dataclass(frozen=True)
class _Survey:
    """What one rank tells the others before anything is loaded. Bit i of `wanted` stands for the i-th key by name."""

    index: str
    wanted: int
    missing: list[str]
    excused: list[str]
    converted: Converted


def find_checkpoint(directory: Path, tag: str | None = None, *, process_group: ProcessGroup | None, rank: int, world: int) -> Path | None:
    """The folder to `load` from `directory`: that of `tag`, else the one `latest` names, else the newest complete one.

    Collective: rank 0 looks, all get its answer. Without a tag, incomplete checkpoints are skipped with a warning,
    and None means that nothing was ever saved here. Raises CheckpointError on all ranks if the tag does not exist or
    is incomplete (the message lists those that are complete), or if everything here is incomplete.
    """
    directory = Path(directory).absolute()
    ranks = Ranks(process_group, rank, world)

    def work() -> str | None:
        found = folders.find(directory, tag)
        return None if found is None else found.name

    name = ranks.on_rank0(f"looking for a checkpoint in {directory}", work)
    return None if name is None else directory / name


def read_index(folder: Path, *, process_group: ProcessGroup | None, rank: int, world: int) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """{key: (shape, dtype)} of the tensors in the checkpoint `folder`. Collective; raises CheckpointError on all ranks."""

    found: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def work() -> None:  # every rank has it already: nothing but errors is exchanged
        folders.read_marker(Path(folder))
        found.update(tensor_index(SafeReader(Path(folder))))

    Ranks(process_group, rank, world).phase(f"reading the index of {folder}", work)
    return found


def tensor_index(reader: SafeReader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """{key: (shape, dtype)} of what `reader` finds."""
    entries = reader.read_metadata().state_dict_metadata
    return {k: (e.size, e.properties.dtype) for k, e in entries.items() if isinstance(e, TensorStorageMetadata)}


@dataclass(frozen=True)
class Comparison:
    """What the ranks want together against what there is, the same on all ranks: keys wanted in vain (`excused` ones by
    ranks that can do without), keys that no rank wants, and the replicated values of the checkpoint."""

    missing: tuple[str, ...]
    excused: tuple[str, ...]
    unexpected: tuple[str, ...]
    values: dict[str, Any]


Check = Callable[[Comparison], None]
"""Raises to refuse the checkpoint. It must decide by what all ranks know alike."""


def load(
    folder: Path,
    tensors: Mapping[str, Sequence[Piece]],
    *,
    process_group: ProcessGroup | None,
    rank: int,
    world: int,
    strict: bool = True,
    only: Sequence[str] = (),
    allow_pickle: bool = False,
    verify: bool = True,
    optional: Collection[str] = (),
    check: Check | None = None,
) -> Loaded:
    """Fills `piece.data` of all `tensors` in place from the checkpoint `folder` (see `find_checkpoint`). Collective.

    Any number of ranks may have saved it, in any pieces. A key without pieces on this rank says that other ranks hold
    them. With `only`, keys of the checkpoint that begin with none of these prefixes are left out of account: they are
    never unexpected. Floating dtypes are converted to those of the pieces; all else must agree. If `strict`, missing
    and unexpected keys are an error; otherwise they are reported, and pieces of missing keys keep their values. Keys in
    `optional` may be missing in any case.

    Values that only a full unpickling reads (see `values`) need `allow_pickle=True`: set it for checkpoints that you
    trust. `verify` compares every file's checksum first, each file on one rank. `check` may refuse what was found before
    anything is filled; it is called on all ranks alike.

    Raises CheckpointError on all ranks, before a piece is touched if a file is damaged or keys, shapes or dtypes do
    not fit. An error of the file system while reading leaves the pieces partly filled: load again or stop.
    """
    ranks = Ranks(process_group, rank, world)
    loader = _Loader(Path(folder).absolute(), ranks, tuple(only), verify)
    loader.read_values(allow_pickle)
    surveys = ranks.phase(loader.doing, lambda: loader.survey(tensors, optional))
    found, converted = loader.compare(surveys, strict)
    if check is not None:
        check(found)
    ranks.torch_phase(loader.doing, lambda: dcp.load(dict(loader.views), storage_reader=loader.reader, **ranks.torch_arguments()))
    return Loaded(
        loader.folder, loader.world, loader.replicated, loader.per_rank, loader.per_rank_note,
        found.missing, found.unexpected, converted,
    )  # fmt: skip


class _Loader:
    """One load, phase by phase; every phase ends on all ranks together."""

    def __init__(self, folder: Path, ranks: Ranks, only: tuple[str, ...], verify: bool) -> None:
        self.folder, self.ranks, self.only, self.verify = folder, ranks, only, verify
        self.doing = f"loading {folder}"
        self.reader = SafeReader(folder)
        self.world = 0  # ranks that saved
        self.keys: list[str] = []
        self.views: dict[str, ShardedTensorView] = {}
        self.replicated: dict[str, Any] = {}
        self.per_rank: dict[str, Any] | None = None
        self.per_rank_note: str | None = None

    def read_values(self, allow_pickle: bool) -> None:
        def work() -> None:
            marker = folders.read_marker(self.folder)
            self.world = marker.world
            if self.verify:
                self._verify_share(marker)
            self.replicated = self._values(folders.REPLICATED, allow_pickle)
            if self.world == self.ranks.world:
                self.per_rank = self._values(folders.rank_file(self.ranks.rank), allow_pickle)
            else:
                self.per_rank_note = (
                    f"{self.folder} was saved by {self.world} ranks and is loaded by {self.ranks.world}: "
                    "what each rank kept for itself (such as random states) has no heir and is not restored"
                )

        self.ranks.phase(self.doing, work)
        if self.per_rank_note:
            log_rank0(self.per_rank_note)

    def _verify_share(self, marker: folders.Marker) -> None:
        for i, (name, expected) in enumerate(sorted(marker.files.items())):
            if i % self.ranks.world == self.ranks.rank and sum_of(self.folder / name) != expected:
                directory, tag = self.folder.parent, folders.tag_of(self.folder.name)
                others = ", ".join(t for t in folders.complete_tags(directory) if t != tag) or "none"
                raise CheckpointError(
                    f"{self.folder / name} is damaged: its checksum is not the one it was saved with; load "
                    f"another checkpoint of {directory} (complete: {others})"
                )

    def _values(self, name: str, allow_pickle: bool) -> dict[str, Any]:
        path = self.folder / name
        return unpack(path.read_bytes(), str(path), allow_pickle=allow_pickle)

    def survey(self, tensors: Mapping[str, Sequence[Piece]], optional: Collection[str]) -> _Survey:
        """Compares what this rank wants with what there is, and describes the pieces to torch."""
        index = self.reader.read_metadata()
        self.keys = sorted(index.state_dict_metadata)
        place = {key: i for i, key in enumerate(self.keys)}
        self.views = {key: ShardedTensorView.of_pieces(key, pieces) for key, pieces in tensors.items() if pieces and key in place}
        converted = self._check_fit(index)
        return _Survey(
            index=hashlib.sha256("\n".join(self.keys).encode()).hexdigest(),
            wanted=sum(1 << place[key] for key in tensors if key in place),
            missing=[key for key in tensors if key not in place and key not in optional],
            excused=[key for key in tensors if key not in place and key in optional],
            converted=converted,
        )

    def _check_fit(self, index: Metadata) -> Converted:
        converted: Converted = {}
        misfits: list[str] = []
        for key, view in self.views.items():
            saved = index.state_dict_metadata[key]
            if not isinstance(saved, TensorStorageMetadata):
                misfits.append(f"{key} is not a tensor in the checkpoint")
            elif tuple(saved.size) != tuple(view.shape):
                misfits.append(f"{key} has shape {tuple(saved.size)} in the checkpoint and {tuple(view.shape)} here")
            elif (have := saved.properties.dtype) != view.dtype:
                if have.is_floating_point and view.dtype.is_floating_point:
                    converted[key] = (have, view.dtype)
                else:
                    misfits.append(f"{key} is {have} in the checkpoint and {view.dtype} here")
        if misfits:
            raise CheckpointError(f"the checkpoint does not fit the model: {listed(misfits, folders.SHOWN, '; ')}")
        return converted

    def compare(self, surveys: list[_Survey], strict: bool) -> tuple[Comparison, Converted]:
        """All ranks reach the same verdict from the same surveys."""
        strangers = [r for r, s in enumerate(surveys) if s.index != surveys[0].index]
        if strangers:
            raise CheckpointError(
                f"{self.doing}: ranks {strangers} see another checkpoint there than rank 0 does; give a folder that all hosts share"
            )
        wanted = 0
        converted: Converted = {}
        for survey in surveys:
            wanted |= survey.wanted
            converted |= survey.converted
        missing = sorted({key for survey in surveys for key in survey.missing})
        excused = {key for survey in surveys for key in survey.excused}.difference(missing)
        unexpected = [key for i, key in enumerate(self.keys) if not wanted >> i & 1 and (not self.only or key.startswith(self.only))]
        if strict and (missing or unexpected):
            told = [f"{what} keys: {listed(keys, folders.SHOWN)}" for what, keys in
                    (("missing", missing), ("unexpected", unexpected)) if keys]  # fmt: skip
            raise CheckpointError(
                f"{self.doing}: the checkpoint does not fit the model; {'; '.join(told)} (load with strict=False to go on without them)"
            )
        return Comparison(tuple(missing), tuple(sorted(excused)), tuple(unexpected), self.replicated), converted
