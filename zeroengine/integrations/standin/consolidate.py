"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights from a checkpoint, in one process and without ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from zeroengine.checkpoint import ModelFolder, SavedCheckpoint, parse_size
from zeroengine.errors import CheckpointError


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The model's weights and persistent buffers on the host: floating-point ones in fp32, from the masters where the engine kept
    some. Raises `CheckpointError`. Frozen parameters that were left out of the checkpoint are not there either;
    `exclude_frozen_parameters` is refused, as a checkpoint does not say which they are. `lazy_mode` is accepted."""
    saved = _saved(checkpoint_dir, tag, exclude_frozen_parameters)
    return {entry.name: saved.read(key, entry.dtype) for entry, key in saved.weights(torch.float32)}


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> nn.Module:
    """`model` on the host with the checkpoint's weights."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], max_shard_size: str | None = "5GB",
    safe_serialization: bool = False, tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Writes the same into the folder `output_dir`, in files of at most `max_shard_size` (None: one file) with an index, named as
    transformers names them. One tensor is in memory at a time."""
    saved = _saved(checkpoint_dir, tag, exclude_frozen_parameters)
    weights = saved.weights(torch.float32)
    saved.write(weights, ModelFolder(
        Path(output_dir), [entry for entry, _ in weights], {}, format="safetensors" if safe_serialization else "torch",
        shard_bytes=sys.maxsize if max_shard_size is None else parse_size(max_shard_size),
    ))  # fmt: skip


def _saved(checkpoint_dir: str | os.PathLike[str], tag: str | None, exclude_frozen_parameters: bool) -> SavedCheckpoint:
    saved = SavedCheckpoint(Path(checkpoint_dir), tag)
    if exclude_frozen_parameters:
        raise CheckpointError(
            f"{saved.folder}: which parameters were frozen is not in a checkpoint; save it with exclude_frozen_parameters=True, or "
            "select from the state dict by name"
        )
    return saved
