"""Operations over many tensors in one call, native where that is possible, with the same bits everywhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroengine.ops import native, twins
from zeroengine.ops.native import KINDS, OF_TORCH, Segment
from zeroengine.ops.registry import choose
from zeroengine.ops.rules import Rule

# Elements that the twin takes at once: its temporaries stay in the cache of a CPU, and small against a GPU's memory.
_PIECE = {"cpu": 1 << 16}
_PIECE_ELSEWHERE = 1 << 24


def update_library(device: torch.device) -> ctypes.CDLL | None:
    """What updates natively on `device`. The answer follows the environment, which takes a while to read beside a step."""
    return choose("update", device).dll


def update(
    rule: Rule,
    segments: Sequence[Segment],
    scale: float | Tensor = 1.0,
    library: Callable[[torch.device], ctypes.CDLL | None] = update_library,
) -> None:
    """One optimizer step of `rule`: multiplies gradients by `scale`, updates parameters and states in place, and writes the
    new parameters, rounded, to the copies. Gradients are not changed.

    Args:
        segments: (parameter, gradient, states, copy or None, hypers). The tensors of one segment have one shape and one
            device; DTensors that are sharded alike are updated where they lie. Parameters, gradients and copies: fp32, bf16,
            fp16 or fp64; states fp32 (fp64 with fp64 parameters).
        scale: a number, or a 0-dim tensor; one on a GPU is read there, without waiting for it.
        library: `update_library`, or what remembers its answers.

    An element's new bits depend on its own values, `scale` and the hypers only: not on where it lies in memory, in which
    segment, or which implementation runs.
    """
    by_device: dict[torch.device, list[Segment]] = {}
    outer: list[Tensor] = []  # DTensors whose local tensors change
    for given in segments:
        segment = _local(given)
        if segment is not given:
            outer.extend(t for t in (given[0], given[3]) if t is not None)
        by_device.setdefault(segment[0].device, []).append(segment)
    for device, those in by_device.items():
        dll = library(device)
        fast: list[Segment] = []
        for segment in those:
            if dll is not None and _takes(segment):
                fast.append(segment)
            else:
                _update_by_twin(rule, segment, scale)
        if dll is not None and fast:
            native.update(dll, rule, fast, scale)
            # autograd notices values that change under it by their version; torch cannot see these writes
            increment_version([t for s in fast for t in (s[0], s[3]) if t is not None])
    increment_version(outer)


@torch.no_grad()
def cast(targets: Sequence[Tensor], sources: Sequence[Tensor], scale: float | Tensor = 1.0) -> None:
    """targets[i] = sources[i] * scale in the target's dtype: fp32, bf16, fp16 (fp64 by the twin). Element-wise in fp32, rounded
    to nearest. A source may be its own target; else they must not overlap."""
    for target, source in zip(targets, sources, strict=True):
        if target.numel() != source.numel() or target.device != source.device:
            raise ValueError(
                f"cast from {tuple(source.shape)} on {source.device} to {tuple(target.shape)} on {target.device}: the sizes and "
                "devices must be equal"
            )
    if not targets:
        return
    dll = choose("cast", targets[0].device).dll
    if dll is not None and all(map(_plain, (*targets, *sources))) and len({t.device for t in targets}) == 1:
        native.cast(dll, targets, sources, scale)
        increment_version(list(targets))
    else:
        for target, source in zip(targets, sources, strict=True):
            twins.cast(target, source.reshape(target.shape) if source.shape != target.shape else source, scale)


def squares(sources: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """(sums of squares in fp64, counts of non-finite elements in int64), one of each for each tensor, on their device.

    One read of each tensor. A sum's bits depend on the elements and their number only, not on address, threads or
    implementation. A sum over a non-finite element is inf or NaN.
    """
    tensors = [t.detach() for t in sources]
    if not tensors:
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    if len({t.device for t in tensors}) > 1:
        raise ValueError(f"tensors of one call lie on one device, not on {sorted({str(t.device) for t in tensors})}")
    dll = choose("squares", tensors[0].device).dll
    if dll is not None and all(map(_plain, tensors)):
        return native.squares(dll, tensors)
    both = [twins.squares(t) for t in tensors]
    return torch.stack([s for s, _ in both]), torch.stack([b for _, b in both])


def _local(segment: Segment) -> Segment:
    """Of DTensors that are sharded alike, what this rank has of them: a rule looks at one element at a time."""
    if type(segment[0]) in OF_TORCH:
        return segment
    from torch.distributed.tensor import DTensor  # takes a while, and where it is needed somebody has done it

    tensors = list(_tensors(segment))
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    if len(sharded) < len(tensors) or len({(t.device_mesh, t.placements) for t in sharded}) > 1:
        return segment
    if any(place.is_partial() for place in sharded[0].placements):
        return segment
    param, grad, *states = (t.to_local() for t in sharded)
    copy = states.pop() if segment[3] is not None else None
    return param, grad, states, copy, segment[4]


def _tensors(segment: Segment) -> Iterator[Tensor]:
    param, grad, states, copy, _ = segment
    yield param
    yield grad
    yield from states
    if copy is not None:
        yield copy


def _takes(segment: Segment) -> bool:
    """Whether the native loop may have a segment: it trusts sizes and types. The twin takes the rest, or says what is wrong."""
    param, grad, states, copy, _ = segment
    n, device, beside = param.numel(), param.device, (grad,) if copy is None else (grad, copy)
    if not _plain(param):
        return False
    for t in beside:
        if t.numel() != n or t.device != device or not _plain(t):
            return False
    for t in states:
        if t.dtype is not torch.float32 or t.numel() != n or t.device != device or not _plain(t):
            return False
    return True


def _plain(t: Tensor) -> bool:
    """Its elements lie one after the other where `data_ptr` says, and have the values that are written there: a DTensor has no memory
    of its own, and torch negates lazily."""
    return t.dtype in KINDS and t.is_contiguous() and not t.is_neg() and (type(t) in OF_TORCH or t.data_ptr() != 0)


def _update_by_twin(rule: Rule, segment: Segment, scale: float | Tensor) -> None:
    param, grad, states, copy, hypers = segment
    wide = torch.float64 if param.dtype is torch.float64 else torch.float32
    factor = scale.to(param.device, wide) if isinstance(scale, Tensor) else scale
    for p, g, held, c in _pieces(param.detach(), grad.detach(), states, copy):
        values = p if p.dtype is wide else p.to(wide)
        rule.twin(values, g.to(wide) * factor, held, hypers)
        if values is not p:
            p.copy_(values)
        if c is not None:
            c.copy_(values)


def _pieces(
    param: Tensor, grad: Tensor, states: Sequence[Tensor], copy: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Sequence[Tensor], Tensor | None]]:
    """The same ranges of all; whole tensors where one is not contiguous."""
    n = param.numel()
    size = _PIECE.get(param.device.type, _PIECE_ELSEWHERE)
    if n <= size or not all(t.is_contiguous() for t in _tensors((param, grad, states, copy, ()))):
        yield param, grad, states, copy
        return
    flat = [t.view(-1) for t in (param, grad, *states)]
    for at in range(0, n, size):
        p, g, *held = (t[at : at + size] for t in flat)
        yield p, g, held, None if copy is None else copy.view(-1)[at : at + size]
