"""Python values (steps, scaler, scheduler, random states, client state) as bytes that are safe to read back.

Each entry is stored by itself. What torch's restricted reader (`torch.load(weights_only=True)`: numbers, strings,
containers, tensors, numpy arrays) gives back needs no trust. An entry with other objects is stored as an ordinary
pickle, and is read only if the caller says that the checkpoint is trusted, since unpickling can run any code.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.serialization import safe_globals

from zeroengine.errors import CheckpointError


def pack(values: Mapping[str, Any], what: str) -> tuple[bytes, tuple[str, ...]]:
    """Serialises `values`; returns the bytes and the keys whose entries only a full unpickling reads.

    `what` names the mapping in the CheckpointError for an entry that cannot be saved at all.
    """
    safe: dict[str, torch.Tensor] = {}
    pickled: dict[str, torch.Tensor] = {}
    for key, value in values.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as exc:
            raise CheckpointError(
                f"{what}[{key!r}] cannot be saved ({exc}): keep plain numbers, strings, containers and tensors in it"
            ) from exc
        data = buffer.getvalue()
        target = safe if _restricted_reader_accepts(data) else pickled
        target[key] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = io.BytesIO()
    torch.save({"safe": safe, "pickled": pickled}, whole)
    return whole.getvalue(), tuple(pickled)


def unpack(data: bytes, what: str, *, allow_pickle: bool) -> dict[str, Any]:
    """The values that `pack` was given; tensors come back on the CPU.

    Raises CheckpointError if an entry needs full unpickling and `allow_pickle` is false, or if the bytes are damaged.
    """
    try:
        parts = torch.load(io.BytesIO(data), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as exc:
        raise CheckpointError(f"{what} is damaged: {exc}") from exc
    if parts["pickled"] and not allow_pickle:
        raise CheckpointError(
            f"{what}: the entries {sorted(parts['pickled'])} hold objects that only a full unpickling reads, and "
            "that can run any code: load with allow_pickle=True if you trust this checkpoint, or keep only "
            "numbers, strings, containers, tensors and numpy arrays in them when saving"
        )
    found: dict[str, Any] = {}
    for group, restricted in (("safe", True), ("pickled", False)):
        for key, entry in parts[group].items():
            try:
                found[key] = _read(ctypes.string_at(entry.data_ptr(), entry.numel()), restricted)
            except Exception as exc:  # full unpickling may raise anything: a class that is gone, its own __setstate__
                raise CheckpointError(f"{what}[{key!r}] cannot be read: {type(exc).__name__}: {exc}") from exc
    return found


def _read(data: bytes, restricted: bool) -> Any:
    if not restricted:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    with safe_globals(_numpy_globals()):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _restricted_reader_accepts(data: bytes) -> bool:
    try:
        _read(data, restricted=True)
    except Exception:  # any refusal means the same: this entry needs the full unpickler
        return False
    return True


def _numpy_globals() -> list[Any]:
    """What rebuilds numpy arrays and scalars of plain numbers (as in its generators' states). It runs no other code."""
    try:
        import numpy as np
    except ImportError:  # numpy is optional: without it no checkpoint of ours holds its arrays
        return []
    reduced = (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0])
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
    return [np.ndarray, np.dtype, *reduced, *kinds]
