"""The engine's weights for the outside world."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroengine.checkpoint import Entry, ModelFolder, Ranks, parse_size
from zeroengine.engine.mechanism import Mechanism
from zeroengine.engine.pieces import other_names, persistent_buffers
from zeroengine.mesh import Mesh
from zeroengine.zero.experts import by_name, names_of
from zeroengine.zero.residency import slot_of
from zeroengine.zero.tensor import whole_shape, whole_value


def whole_parameters(module: nn.Module, mechanism: Mechanism) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of every parameter in order of registration, one bucket gathered at a time. Collective: every rank
    must exhaust the iterator. Parts of shared layers are joined. Values are views that live until the next one is asked for."""
    named = list(module.named_parameters())
    position = 0
    while position < len(named):
        slot = slot_of(named[position][1])
        if slot is None:
            name, p = named[position]
            yield name, whole_value(p, p.data, name)
            position += 1
            continue
        with mechanism.sharder.gathered([slot.bucket]):
            while position < len(named):
                here = slot_of(named[position][1])
                if here is None or here.bucket is not slot.bucket:
                    break
                name, p = named[position]
                yield name, whole_value(p, p.data, name)
                position += 1


def model_files(module: nn.Module) -> dict[str, str]:
    """{name: text} of what a Hugging Face model writes beside its weights; nothing for other models."""
    files: dict[str, str] = {}
    architecture = getattr(module, "source_architecture", None)  # of a model that was cut into stages
    if architecture is None and not hasattr(module, "save_pretrained"):
        return files
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        text = getattr(getattr(module, attribute, None), "to_json_string", None)
        if callable(text):
            files[name] = text()
    if "config.json" in files:
        values = json.loads(files["config.json"])
        values["architectures"] = values.get("architectures") or [architecture or type(module).__name__]
        files["config.json"] = json.dumps(values, indent=2) + "\n"
    return files


class WeightMethods:
    """Methods of `ZeroEngine` that bring weights out."""

    module: nn.Module
    mechanism: Mechanism
    mesh: Mesh

    def full_state_dict(self, dtype: torch.dtype | None = None, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The module's complete state_dict in host memory on rank 0 (None elsewhere); tied weights under each of their
        names share memory. Collective; one bucket is gathered at a time. `dtype` casts floating-point parameters."""
        keep = self.mesh.rank == 0
        values: dict[int, dict[str, Tensor]] = {}
        params = dict(self.module.named_parameters())
        for name, value in whole_parameters(self.module, self.mechanism):
            p = params[name]
            found = by_name(p, name, value)
            if keep and not (exclude_frozen_parameters and not p.requires_grad):
                cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
                values[id(p)] = {n: v.detach().to(device="cpu", dtype=cast, copy=True) for n, v in found.items()}
        if not keep:
            return None
        result: dict[str, Tensor] = {}
        for prefix, child in self.module.named_modules(remove_duplicate=False):
            at = prefix + "." if prefix else ""
            for name, p in child._parameters.items():
                if p is not None and id(p) in values:
                    kept = values[id(p)]  # of an expert, all ranks' of the same place
                    result.update(kept if len(kept) > 1 else {at + name: next(iter(kept.values()))})
                elif p is not None and not p.numel():
                    result[at + name] = torch.empty(p.shape, dtype=p.dtype)
            for name, b in child._buffers.items():
                if b is not None and name not in child._non_persistent_buffers_set:
                    result[at + name] = b.detach().to("cpu", copy=True)
        return result

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the complete weights in the type they are used in as one file: a state_dict that `torch.load` reads, or
        safetensors if the name ends so. Collective; one bucket is in memory at a time. Errors on rank 0 reach every rank, and
        a file that was there before stays."""
        kind = "safetensors" if save_filename.endswith(".safetensors") else "torch"

        def make(entries: list[Entry], others: dict[str, str]) -> ModelFolder:
            return ModelFolder(Path(save_dir), entries, others, format=kind, filename=save_filename)

        self._write_weights(make, f"writing {Path(save_dir) / save_filename}", None, exclude_frozen_parameters)
        return True

    def save_pretrained(
        self, save_dir: str | Path, *, dtype: torch.dtype | None = None, max_shard_size: str = "5GB", format: str = "safetensors"
    ) -> None:
        """Writes a folder that `from_pretrained` loads: weights in files of at most `max_shard_size` with an index, and the
        configuration if the model is one of Hugging Face's. `dtype` casts floating-point weights (the default is the type they
        are used in); `format` is "safetensors" or "torch". Collective; one bucket is in memory at a time."""

        def make(entries: list[Entry], others: dict[str, str]) -> ModelFolder:
            size, files = parse_size(max_shard_size), model_files(self.module)
            return ModelFolder(Path(save_dir), entries, others, format=format, shard_bytes=size, files=files)

        self._write_weights(make, f"writing {save_dir}", dtype, exclude_frozen=False)

    def _write_weights(
        self,
        make: Callable[[list[Entry], dict[str, str]], ModelFolder],
        doing: str,
        dtype: torch.dtype | None,
        exclude_frozen: bool,
    ) -> None:
        """Gathers bucket after bucket, and rank 0 puts the values where `make` says. Collective."""
        entries, others = self._weight_entries(dtype, exclude_frozen)
        known = {entry.name for entry in entries}
        sink: ModelFolder | None = None
        error: Exception | None = None
        try:
            sink = make(entries, others) if self.mesh.rank == 0 else None
        except Exception as exc:  # the others gather already: they hear of it at the end
            error = exc
        for name, value in self._weight_values():
            if sink is not None and error is None and name in known:
                try:
                    sink.put(name, value)
                except Exception as exc:
                    error = exc

        def finish() -> None:
            if error is not None:
                if sink is not None:
                    sink.abandon()
                raise error
            if sink is not None:
                sink.close()

        Ranks.of_job().phase(doing, finish)

    def _weight_entries(self, dtype: torch.dtype | None, exclude_frozen: bool) -> tuple[list[Entry], dict[str, str]]:
        """What is to be written, and {other name: name} of tied weights. Collective."""

        def cast(t: Tensor) -> torch.dtype:
            return dtype if dtype is not None and t.is_floating_point() else t.dtype

        params = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad or not exclude_frozen]
        named = {each: p for n, p in params for each in names_of(p, n)}
        buffers = dict(persistent_buffers(self.module))
        entries = [Entry(n, tuple(whole_shape(t)), cast(t)) for n, t in {**named, **buffers}.items()]
        return entries, {other: name for other, name in other_names(self.module).items() if name in named or name in buffers}

    def _weight_values(self) -> Iterator[tuple[str, Tensor]]:
        """(name, values) of every parameter and buffer, for rank 0. Collective: every rank must exhaust the iterator."""
        params = dict(self.module.named_parameters())
        for name, value in whole_parameters(self.module, self.mechanism):
            yield from by_name(params[name], name, value).items()
        yield from persistent_buffers(self.module)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        return self.full_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
