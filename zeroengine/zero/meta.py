"""Values for a model that was built on the meta device, one module at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zeroengine.errors import ModelError
from zeroengine.zero.init import Init

Values = Mapping[str, Tensor] | Callable[[str], Tensor | None]


@torch.no_grad()
def materialize(module: nn.Module, values: Values | None = None, *, init: Init | None = None) -> nn.Module:
    """Gives every parameter and buffer of `module` that is on the meta device a value, and returns `module`. Collective.

    `values`: a mapping by full name (a state dict, or what reads a file tensor by tensor), or a function of the name that
    returns a tensor or None. A module with parameters that have none there runs its `reset_parameters()`, in the order of
    `module.modules()`. Parameters are sharded as soon as their module is done, as inside `zero.Init` (`init`: one with options of
    its own), so a rank holds its share and one module. A parameter that is used in several places stays one.

    Raises `ModelError` that names what has no value: a buffer that only the constructor computes, or a parameter of a
    module without `reset_parameters`; and a value of another shape.
    """
    find = values if callable(values) else (values or {}).get
    known: dict[int, Tensor] = {}
    with init if init is not None else Init():
        for path, child in module.named_modules():
            _fill(child, f"{path}." if path else "", find, known)
    return module


def _fill(child: nn.Module, prefix: str, find: Callable[[str], Tensor | None], known: dict[int, Tensor]) -> None:
    missing = []
    for name, p in list(child._parameters.items()):
        if p is None or not p.is_meta:
            continue
        if id(p) not in known:
            new = nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=p.requires_grad)
            known[id(p)] = new
            if not _take(new, prefix + name, find):
                missing.append(name)
        child.register_parameter(name, known[id(p)])  # type: ignore[arg-type]
    buffers = []
    for name, buffer in list(child._buffers.items()):
        if buffer is None or not buffer.is_meta:
            continue
        if id(buffer) not in known:
            known[id(buffer)] = torch.full_like(buffer, _unset(buffer), device="cpu")
            if not _take(known[id(buffer)], prefix + name, find):
                buffers.append(name)
        child._buffers[name] = known[id(buffer)]
    if missing or buffers:
        _reset(child, prefix, missing, buffers, find)


def _reset(child: nn.Module, prefix: str, missing: list[str], buffers: list[str], find: Callable[[str], Tensor | None]) -> None:
    """The module's own initialiser for what has no value; what has one is written again, over the initialiser's."""
    reset = getattr(child, "reset_parameters", None)
    if callable(reset):
        reset()
        for name, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is not None and name not in missing and name not in buffers:
                _take(tensor, prefix + name, find)
    else:
        buffers = [*missing, *buffers]
    for name in buffers:
        tensor = getattr(child, name)
        if not callable(reset) or _is_unset(tensor):
            raise ModelError(
                f"'{prefix}{name}' of {type(child).__name__} is on the meta device and has no value: there is none for it in "
                "`values`, and the module has no reset_parameters() that sets it; give one, or build the model inside "
                "zeroengine.zero.Init()"
            )


def _take(target: Tensor, name: str, find: Callable[[str], Tensor | None]) -> bool:
    value = find(name)
    if value is None:
        return False
    if value.shape != target.shape:
        raise ModelError(f"'{name}' has the shape {tuple(target.shape)}, but its value {tuple(value.shape)}; give the values of this model")
    target.copy_(value)
    return True


def _unset(buffer: Tensor) -> float | bool | int:
    """A value that a buffer does not get from its module: NaN, or the smallest integer."""
    if buffer.is_floating_point() or buffer.is_complex():
        return float("nan")
    return False if buffer.dtype is torch.bool else torch.iinfo(buffer.dtype).min


def _is_unset(buffer: Tensor) -> bool:
    marker = _unset(buffer)
    return bool((buffer != buffer).all()) if marker != marker else bool((buffer == marker).all())
