"""A complete checkpoint without a model and without ranks: what is in it, one tensor at a time, and its weights out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from zeroengine.checkpoint import folder as folders
from zeroengine.checkpoint.files import Entry
from zeroengine.checkpoint.loading import tensor_index
from zeroengine.checkpoint.model_folder import SHARD_BYTES, ModelFolder
from zeroengine.checkpoint.ranks import Ranks
from zeroengine.checkpoint.storage import SafeReader, sum_of
from zeroengine.checkpoint.values import unpack
from zeroengine.errors import CheckpointError
from zeroengine.wording import listed


class SavedCheckpoint:
    """The checkpoint at `path`: a complete one, or a directory of them (then `tag`, `latest` or the newest complete one)."""

    def __init__(self, path: str | Path, tag: str | None = None, *, allow_pickle: bool = False) -> None:
        """Raises CheckpointError if there is none or it is damaged. `allow_pickle`: see `engine.load_checkpoint`."""
        given = Path(path).absolute()
        if not given.is_dir():
            raise CheckpointError(f"{given} is not a folder")
        if tag is None and (given / folders.MARKER).is_file():
            found: Path | None = given
        else:
            found = folders.find(given, tag)
        if found is None:
            raise CheckpointError(f"{given} is neither a complete checkpoint nor a folder with one")
        self.folder = found
        self.marker = folders.read_marker(found)
        self._reader = SafeReader(found)
        self.index = tensor_index(self._reader)
        self._allow_pickle = allow_pickle

    def values(self) -> dict[str, Any]:
        """The Python values that are the same on all ranks: counters, param_groups, scheduler, client_state, ..."""
        path = self.folder / folders.REPLICATED
        return unpack(path.read_bytes(), str(path), allow_pickle=self._allow_pickle)

    def read(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor `key` on the CPU, cast to `dtype`; memory holds it and one piece of it as it was written."""
        shape, saved = self.index[key]
        value = torch.zeros(shape, dtype=saved if dtype is None else dtype)
        ranks = Ranks(None, 0, 1)
        ranks.torch_phase(f"reading {key}", lambda: dcp.load({key: value}, storage_reader=self._reader, no_dist=True))
        return value

    def damaged(self) -> Iterator[str]:
        """Names of files whose contents are not those that were written."""
        for name, expected in sorted(self.marker.files.items()):
            if sum_of(self.folder / name) != expected:
                yield name

    def weights(self, dtype: torch.dtype | None) -> list[tuple[Entry, str]]:
        """(entry, key) of every weight and buffer. Floating ones are of `dtype`, read from the fp32 master where that is more
        precise; None keeps the type in which they were used."""
        found = []
        for key, (shape, saved) in self.index.items():
            if key.startswith("model."):
                name = key.removeprefix("model.")
                wanted = dtype if dtype is not None and saved.is_floating_point else saved
                master = f"master.{name}"
                better = master in self.index and wanted != saved
                found.append((Entry(name, tuple(shape), wanted), master if better else key))
        return found

    def write(self, weights: Iterable[tuple[Entry, str]], folder: ModelFolder) -> None:
        """Fills and closes a folder that was made for `weights`, with one tensor in memory at a time."""
        try:
            for entry, key in weights:
                folder.put(entry.name, self.read(key, entry.dtype))
        except BaseException:
            folder.abandon()
            raise
        folder.close()


def export_weights(
    saved: SavedCheckpoint,
    out: str | Path,
    *,
    format: str = "safetensors",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Entry]:
    """Writes the weights of a checkpoint into the folder `out`; returns what it wrote. One tensor is in memory at a time.

    The configuration of a Hugging Face model goes with them, so that `from_pretrained(out)` loads it. Raises CheckpointError
    if the checkpoint was saved without its frozen parameters.
    """
    values = saved.values()
    if values.get("excluded"):
        raise CheckpointError(
            f"{saved.folder} was saved without frozen parameters ({listed(values['excluded'])}), so its weights "
            "are not a whole model; load it into the model with engine.load_checkpoint and use engine.save_pretrained"
        )
    weights = saved.weights(dtype)
    others = {other: name for other, name in values.get("other_names", {}).items() if f"model.{name}" in saved.index}
    folder = ModelFolder(
        Path(out), [entry for entry, _ in weights], others, format=format, shard_bytes=shard_bytes,
        files=values.get("model_files", {}),
    )  # fmt: skip
    saved.write(weights, folder)
    return [entry for entry, _ in weights]
