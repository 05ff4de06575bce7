"""Calls of the native libraries: tables of addresses, one call for many tensors."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.errors import ZeroEngineError
from zeroengine.ops.rules import Numbers, Rule

KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # Kind of csrc/ze/segments.h

OF_TORCH = (Tensor, torch.nn.Parameter)  # classes whose tensors have memory of their own for sure

# (parameter, gradient, states, copy or None, hypers)
Segment = tuple[Tensor, Tensor, Sequence[Tensor], Tensor | None, Numbers]


class _Table:
    """Rows of 64-bit words, and where they lie."""

    def __init__(self, width: int) -> None:
        self._words = array("q")
        self._width = width

    def add(self, *words: int) -> None:
        self._words.extend(words)

    def __len__(self) -> int:
        return len(self._words) // self._width

    @property
    def address(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._words.buffer_info()[0])


class _Scale:
    """The factor on gradients: a number, or a place on the device that holds it."""

    def __init__(self, scale: float | Tensor, device: torch.device) -> None:
        self._held = scale.to(device, torch.float32) if isinstance(scale, Tensor) else None
        on_device = self._held is not None and device.type == "cuda"
        self.value = ctypes.c_float(1.0 if on_device else float(scale))
        self.address = ctypes.c_void_p(self._held.data_ptr() if on_device and self._held is not None else None)


def update(dll: ctypes.CDLL, rule: Rule, segments: Sequence[Segment], scale: float | Tensor) -> None:
    """One step of `rule` for all segments, which lie on one device and are what `flat` takes to be native."""
    table, numbers, rows = _Table(8), array("f"), dict[bytes, int]()  # rows by their bits: 0.0 and -0.0 are equal numbers
    last: Numbers | None = None
    row = 0
    spare = (0,) * (3 - rule.states)
    for param, grad, states, copy, hypers in segments:
        if hypers is not last:
            last, rounded = hypers, array("f", map(_finite_float, hypers))
            row = rows.setdefault(rounded.tobytes(), len(rows))
            if row * len(hypers) == len(numbers):
                numbers.extend(rounded)
        kinds = KINDS[param.dtype] | KINDS[grad.dtype] << 8 | row << 32
        to = 0
        if copy is not None:
            kinds |= KINDS[copy.dtype] << 16
            to = copy.data_ptr()
        table.add(param.data_ptr(), grad.data_ptr(), *[s.data_ptr() for s in states], *spare, to, param.numel(), kinds)
    hypers_at = ctypes.c_void_p(numbers.buffer_info()[0])
    device = segments[0][0].device
    factor = _Scale(scale, device)
    head = (ctypes.c_int(rule.code), table.address, ctypes.c_int64(len(table)), hypers_at, factor.value)
    if device.type == "cpu":
        code = dll.ze_update(*head, ctypes.c_int(torch.get_num_threads()))
    else:
        code = dll.ze_update_cuda(*head, factor.address, *_stream(device))
    _check(dll, code, f"update by {rule.name}", device)


def cast(dll: ctypes.CDLL, targets: Sequence[Tensor], sources: Sequence[Tensor], scale: float | Tensor) -> None:
    table = _Table(4)
    for target, source in zip(targets, sources, strict=True):
        kinds = KINDS[target.dtype] | KINDS[source.dtype] << 8
        table.add(target.data_ptr(), source.data_ptr(), target.numel(), kinds)
    device = targets[0].device
    factor = _Scale(scale, device)
    head = (table.address, ctypes.c_int64(len(table)), factor.value)
    if device.type == "cpu":
        code = dll.ze_cast(*head, ctypes.c_int(torch.get_num_threads()))
    else:
        code = dll.ze_cast_cuda(*head, factor.address, *_stream(device))
    _check(dll, code, "cast", device)


def squares(dll: ctypes.CDLL, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    table = _Table(3)
    for source in sources:
        table.add(source.data_ptr(), source.numel(), KINDS[source.dtype])
    sums = torch.empty(len(sources), dtype=torch.float64)
    bad = torch.empty(len(sources), dtype=torch.int64)
    dll.ze_squares(
        table.address,
        ctypes.c_int64(len(table)),
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_void_p(bad.data_ptr()),
        ctypes.c_int(torch.get_num_threads()),
    )
    return sums, bad


def _finite_float(x: float) -> float:
    """array("f") refuses numbers beyond fp32; torch rounds them to infinity."""
    return x if abs(x) < 3.4028235e38 or x != x else float("inf") if x > 0 else float("-inf")


def _stream(device: torch.device) -> tuple[ctypes.c_int, ctypes.c_void_p]:
    stream = torch.cuda.current_stream(device)
    return ctypes.c_int(stream.device_index), ctypes.c_void_p(stream.cuda_stream)


def _check(dll: ctypes.CDLL, code: int, what: str, device: torch.device) -> None:
    if not code:
        return
    said = f"error {code}"
    if device.type == "cuda":
        dll.ze_cuda_error.restype = ctypes.c_char_p
        said = dll.ze_cuda_error(ctypes.c_int(code)).decode()
    raise ZeroEngineError(f"native {what} on {device} failed: {said}; ZE_OPS=twin runs it on torch")
