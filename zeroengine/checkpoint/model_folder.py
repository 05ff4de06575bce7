"""A model's weights as one file or several with an index, as `from_pretrained` and `torch.load` expect them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from zeroengine.checkpoint.files import Entry, SafetensorsFile, TorchFile, WeightFile
from zeroengine.checkpoint.storage import write_file
from zeroengine.errors import CheckpointError
from zeroengine.wording import bytes_of

FORMATS = {"safetensors": ("model", "safetensors"), "torch": ("pytorch_model", "bin")}
SHARD_BYTES = 5 * 10**9


def parse_size(text: str) -> int:
    """Bytes of a size such as "5GB" or "500MiB"; raises CheckpointError for anything else."""
    size = bytes_of(text)
    if size is None:
        raise CheckpointError(f"{text!r} is not a size such as 5GB or 500MiB")
    return size


class ModelFolder:
    """Weights on their way into a folder: `put` each one, in any order, then `close`. One is in memory at a time."""

    def __init__(
        self,
        folder: Path,
        entries: Sequence[Entry],
        other_names: Mapping[str, str],
        *,
        format: str = "safetensors",
        shard_bytes: int = SHARD_BYTES,
        files: Mapping[str, str] | None = None,
        filename: str | None = None,
    ) -> None:
        """`other_names` maps further names of tied tensors to names in `entries`. `files` are texts to put beside the weights,
        such as config.json. Where there is a config.json, safetensors hold tied weights once, as transformers writes them;
        else under each of their names. With `filename` there is one file of that name, and nothing else is touched.

        Raises CheckpointError for an unknown format.
        """
        if format not in FORMATS:
            raise CheckpointError(f"format {format!r}: one of {', '.join(FORMATS)}")
        self.folder, self.texts = folder, dict(files or {})
        self._stem, self._suffix = FORMATS[format]
        self._copies: dict[str, list[str]] = {}
        if format == "safetensors" and "config.json" not in self.texts:
            known = {entry.name: entry for entry in entries}
            for other, name in other_names.items():
                if name in known:
                    self._copies.setdefault(name, []).append(other)
                    entries = [*entries, Entry(other, known[name].shape, known[name].dtype)]
            other_names = {}
        groups = _cut(entries, shard_bytes) if filename is None else [list(entries)]
        self._filename = filename
        patterns = () if filename is not None else (f"{self._stem}*.{self._suffix}", f"{self._stem}*.index.json")
        self._old = {path.name for pattern in patterns for path in folder.glob(pattern)}
        folder.mkdir(parents=True, exist_ok=True)
        self._open: list[WeightFile] = []
        self._of: dict[str, WeightFile] = {}
        self._map: dict[str, str] = {}
        floating = Counter({entry.dtype: 0 for entry in entries if entry.dtype.is_floating_point})
        for entry in entries:
            if entry.dtype in floating:
                floating[entry.dtype] += entry.nbytes
        self._dtype = floating.most_common(1)[0][0] if floating else None
        self._bytes = sum(entry.nbytes for entry in entries)
        kind = SafetensorsFile if format == "safetensors" else TorchFile
        try:
            for i, group in enumerate(groups):
                here = {entry.name for entry in group}
                name = self._name(i, len(groups))
                others = {other: first for other, first in other_names.items() if first in here}
                file = kind(folder / name, group, others)
                self._open.append(file)
                self._of.update(dict.fromkeys(here, file))
                self._map.update(dict.fromkeys([*here, *(others if format == "torch" else ())], name))
        except BaseException:
            self.abandon()
            raise
        self._names = {self._name(i, len(groups)) for i in range(len(groups))}

    def _name(self, i: int, count: int) -> str:
        if self._filename is not None:
            return self._filename
        return f"{self._stem}.{self._suffix}" if count == 1 else f"{self._stem}-{i + 1:05d}-of-{count:05d}.{self._suffix}"

    def put(self, name: str, tensor: Tensor) -> None:
        for each in (name, *self._copies.get(name, ())):
            self._of[each].put(each, tensor)

    def close(self) -> None:
        """Makes the files appear, the index last, and removes weight files of an earlier export into this folder."""
        try:
            for file in self._open:
                file.close()
        except BaseException:
            self.abandon()
            raise
        for name, text in self.texts.items():
            write_file(self.folder / name, self._with_dtype(text).encode() if name == "config.json" else text.encode())
        index = f"{self._stem}.{self._suffix}.index.json"
        if len(self._names) > 1:
            content = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(self._map.items()))}
            write_file(self.folder / index, json.dumps(content, indent=2).encode())
            self._names.add(index)
        for name in self._old - self._names:
            (self.folder / name).unlink(missing_ok=True)

    def _with_dtype(self, text: str) -> str:
        """The configuration with the type of these weights, which `from_pretrained` loads them in."""
        config = json.loads(text)
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        if self._dtype is not None:
            config[name] = str(self._dtype).removeprefix("torch.")
        return json.dumps(config, indent=2) + "\n"

    def abandon(self) -> None:
        """Removes what is not complete."""
        for file in self._open:
            file.abandon()


def _cut(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    return groups
