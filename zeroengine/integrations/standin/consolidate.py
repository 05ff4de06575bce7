"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights from a checkpoint, in one process and without ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zeroengine.checkpoint import find_checkpoint, load
from zeroengine.errors import CheckpointError
from zeroengine.zero.layout import Piece

_MODEL, _MASTER = "model.", "master."


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The model's weights and persistent buffers on the host: floating-point ones in fp32, from the masters where the engine kept
    some. Raises `CheckpointError`. Frozen parameters that were left out of the checkpoint are not there either;
    `exclude_frozen_parameters` on a checkpoint that has them is refused, as it does not say which they are. `lazy_mode` is accepted."""
    alone: dict[str, Any] = {"process_group": None, "rank": 0, "world": 1}
    folder = find_checkpoint(Path(checkpoint_dir), tag, **alone)
    if folder is None:
        raise CheckpointError(f"no complete checkpoint in {checkpoint_dir}")
    if exclude_frozen_parameters:
        raise CheckpointError(
            f"{folder}: which parameters were frozen is not in a checkpoint; save it with exclude_frozen_parameters=True, or select "
            "from the state dict by name"
        )
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {key: meta for key, meta in saved.items() if isinstance(meta, TensorStorageMetadata)}
    result: dict[str, Tensor] = {}
    pieces: dict[str, list[Piece]] = {}
    for key, meta in sizes.items():
        if not key.startswith(_MODEL):
            continue
        name, kind = key.removeprefix(_MODEL), meta.properties.dtype
        result[name] = torch.empty(meta.size, dtype=torch.float32 if kind.is_floating_point else kind)
        master = _MASTER + name
        wanted = master if master in sizes else key
        pieces[wanted] = [Piece(name, result[name].shape, 0, result[name].view(-1))]
    load(folder, pieces, strict=False, only=list(pieces), **alone)
    return result


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> nn.Module:
    """`model` on the host with the checkpoint's weights."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], max_shard_size: str | None = "5GB",
    safe_serialization: bool = False, tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Writes the whole fp32 weights into the folder `output_dir`, in files of at most `max_shard_size` with an index, named as
    transformers names them."""
    from huggingface_hub import split_torch_state_dict_into_shards

    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    weights = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    stem, _, suffix = weights.rpartition(".")
    plan = split_torch_state_dict_into_shards(
        state, filename_pattern=stem + "{suffix}." + suffix, max_shard_size=max_shard_size or sum(t.nbytes for t in state.values()) + 1
    )
    for name, keys in plan.filename_to_tensors.items():
        part = {key: state[key] for key in keys}
        if safe_serialization:
            from safetensors.torch import save_file

            save_file(part, folder / name, metadata={"format": "pt"})
        else:
            torch.save(part, folder / name)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / f"{weights}.index.json").write_text(json.dumps(index, indent=2) + "\n")
