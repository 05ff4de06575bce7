"""The C interface of csrc/shm. Calls that take long release the GIL, and never need it while they hold a lock of their own."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from zeroengine.ops.build import Library, library

_I64, _INT, _F64, _TEXT = ctypes.c_int64, ctypes.c_int, ctypes.c_double, ctypes.c_char_p
_ARRAY = ctypes.POINTER(ctypes.c_int64)
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "map": (_I64, (_INT, _I64, _INT)),
    "unmap": (_INT, (_I64, _I64)),
    "large_pages": (_INT, (_I64, _I64)),
    "discard": (_INT, (_INT, _I64, _I64)),
    "control_bytes": (_I64, (_I64,)),
    "control_clear": (None, (_I64,)),
    "group_new": (_I64, (_INT, _INT, _ARRAY, _ARRAY, _I64, _I64, _INT)),
    "group_delete": (None, (_I64,)),
    "interrupt": (None, (_I64,)),
    "announce": (None, (_I64, _ARRAY, _TEXT)),
    "announced": (None, (_I64, _INT, _ARRAY, _TEXT)),
    "awaited": (_INT, (_I64,)),
    "finish": (_INT, (_I64,)),
    "can_sum": (_INT, (_INT, _INT)),
    "run": (_INT, (_I64, ctypes.c_void_p)),
    "all_to_all": (_INT, (_I64, _I64, _I64, _ARRAY, _ARRAY, _ARRAY, _ARRAY, _ARRAY, _I64, _I64)),
    "stream_new": (_I64, (_I64,)),
    "stream_delete": (None, (_I64,)),
    "stream_put": (_INT, (_I64, ctypes.c_void_p)),
    "stream_serve": (_INT, (_I64, ctypes.POINTER(_INT))),
    "stream_done": (_I64, (_I64,)),
    "stream_wait": (_INT, (_I64, _I64, _F64)),
    "stream_busy": (_INT, (_I64,)),
    "stream_span": (_INT, (_I64, _I64, ctypes.POINTER(_F64))),
    "stream_stop": (None, (_I64,)),
    "stream_give_up": (None, (_I64,)),
    "stream_close": (None, (_I64,)),
    "copy": (None, (_I64, _I64, _I64)),
    "sum": (None, (_I64, _ARRAY, _INT, _I64, _INT, _INT, _F64, _INT)),
}  # fmt: skip

_QUICK = {"stream_put", "stream_done", "stream_busy", "stream_span", "can_sum"}  # not worth letting another thread in

DONE, DIVERGED, INTERRUPTED = range(3)

TYPES: dict[torch.dtype, int] = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16,
            torch.int32, torch.int64,
        )
    )
}  # fmt: skip
"""Types that are added natively, with their codes."""


class Native:
    """Functions of the library, without their prefix."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        held = ctypes.PyDLL(dll._name, handle=dll._handle)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(held if name in _QUICK else dll, f"ze_shm_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # only for names that __init__ did not set
        raise AttributeError(f"csrc/shm has no function {name!r}")


@cache
def _bind(dll: ctypes.CDLL) -> Native:
    return Native(dll)


def native() -> Native | str:
    """The library, or in one line why there is none."""
    found: Library = library("shm")
    return _bind(found.dll) if found.dll is not None else found.reason


def made(handle: int) -> int:
    """`handle` of something new."""
    if not handle:
        raise MemoryError("no memory for the control of collectives in shared memory")
    return int(handle)


def integers(values: list[int] | tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
