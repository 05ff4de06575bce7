"""torch files of other programs, read without their classes and without running their code.

`torch.load` with the restricted unpickler refuses whole files for one unknown class, and DeepSpeed puts its own objects (a loss
scaler, an enum, addresses) beside the tensors. Here every class beyond plain values and tensors becomes `Unknown`, which keeps
what it was made from and does nothing.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zeroengine.errors import CheckpointError

_PLAIN = {
    ("collections", "OrderedDict"), ("torch", "Size"), ("torch", "device"), ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"), ("torch._tensor", "_rebuild_from_type_v2"), ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"), ("torch.serialization", "_get_layout"), ("builtins", "set"), ("builtins", "frozenset"),
    ("builtins", "complex"), ("builtins", "slice"), ("builtins", "range"), ("_codecs", "encode"),
}  # fmt: skip


class Unknown:
    """An object of a class that is not read: `args` it was made from, and its attributes where it had a dict of them."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Unknown:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], (dict, type(None))):
            state = {**(state[0] or {}), **(state[1] or {})}
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, item: Any) -> None:
        """A list of an unknown class: its items are not kept."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """A mapping of an unknown class: its items are not kept."""


class _Unpickler(pickle._Unpickler):  # the Python one: torch's wrapper and it share `find_class`
    def find_class(self, module: str, name: str) -> Any:
        if module == "copy_reg" or (module, name) == ("copyreg", "_reconstructor"):
            return _reconstruct
        if (module, name) in _PLAIN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        return type(name, (Unknown,), {"__module__": module})


def _reconstruct(cls: Any, base: Any, state: Any) -> Any:
    return cls() if isinstance(cls, type) and issubclass(cls, (Unknown, OrderedDict)) else Unknown(cls, base, state)


def load_foreign(path: Path) -> Any:
    """The contents of a torch file, tensors mapped from the disk (read as they are used). Raises CheckpointError."""
    module = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="zeroengine.checkpoint.foreign_pickle")
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as exc:
        raise CheckpointError(f"{path} cannot be read as a torch file: {type(exc).__name__}: {exc}") from exc


def has_unknown(value: Any) -> bool:
    """Whether an object of an unknown class is in plain containers of `value`."""
    if isinstance(value, dict):
        return any(has_unknown(v) for v in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(has_unknown(v) for v in value)
    return isinstance(value, Unknown) or (isinstance(value, type) and issubclass(value, Unknown))
