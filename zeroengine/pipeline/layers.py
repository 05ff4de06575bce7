"""Layers that are built where they are needed, and weights that several of them share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ModelError


class LayerSpec:
    """A layer that is built only on the rank that runs it: `LayerSpec(nn.Linear, 4, 4, bias=False)`."""

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise ModelError(f"LayerSpec takes a class or a function, not {type(typename).__name__}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    @property
    def name(self) -> str:
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self) -> Any:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with all others of the same `key`, on whatever stages they lie.

    `tied_weight_attr`: one or several attribute paths ("weight", "linear.weight"); each occurrence must have them, of the same
    shape. `forward_fn(module, input)` is called instead of the module where given.
    """

    def __init__(
        self, key: str, typename: Callable[..., Any], *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None, tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key.replace(".", "_")
        self.forward_fn = forward_fn
        self.attributes = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)


@dataclass(frozen=True)
class Tie:
    """Parameters shared by several stages: `names` are those of the module's `named_parameters`, in a fixed order, and
    `stages` the ones that have them, ascending; the first is the owner. `uses`: for each name those under which the layers
    of all stages have it."""

    key: str
    names: tuple[str, ...]
    stages: tuple[int, ...]
    uses: tuple[tuple[str, ...], ...] = ()


def attribute(module: Any, path: str, where: str) -> tuple[nn.Module, str, nn.Parameter]:
    """(module that has it, last name, parameter) of a path."""
    holder, _, name = path.rpartition(".")
    try:
        owner = module.get_submodule(holder)
    except AttributeError as error:
        raise ModelError(f"{where}: {error}") from error
    found = owner._parameters.get(name)
    if found is None:
        own = [n for n, _ in module.named_parameters()]
        raise ModelError(f"{where} has no parameter '{path}' to tie; its parameters are {own}")
    return owner, name, found


class TiedLayer(nn.Module):
    """A tied layer with its own way to be called."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._forward_fn = forward_fn

    def forward(self, x: Any) -> Any:
        return self._forward_fn(self.module, x)


class FunctionLayer(nn.Module):
    """A layer given as a plain function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(x)


def tied_name(key: str, path: str) -> str:
    """Name of a tied parameter in a `PipelineModule`, the same on every stage."""
    return f"tied.{key}.{path.replace('.', '_')}"


def share(container: nn.Module, key: str, attributes: Sequence[str], layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Makes the listed layers use one parameter for each attribute, registered in `container` under `key`."""
    holder = nn.Module()
    container.add_module(key, holder)
    for path in attributes:
        kept: nn.Parameter | None = None
        for where, layer in layers:
            owner, name, found = attribute(layer, path, where)
            if kept is None:
                kept = found
            elif found.shape != kept.shape:
                raise ModelError(
                    f"{where}: '{path}' of shape {tuple(found.shape)} is tied to one of shape {tuple(kept.shape)} (key '{key}')"
                )
            owner._parameters[name] = kept
        holder.register_parameter(path.replace(".", "_"), kept)


def check_owners(layers: Sequence[Any], stage_of: Callable[[int], int], loss_fn: Any = None) -> None:
    """Refuses layers given as modules or functions that use a parameter of another stage's layer, or of none: each stage would
    train its own copy of it, or nobody would."""
    owners: dict[nn.Parameter, tuple[str, int | None, str]] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        for name, p in layer.named_parameters():
            where, stage, first = owners.setdefault(p, (f"layer {i}", stage_of(i), name))
            if stage != stage_of(i):
                raise ModelError(
                    f"{where} of stage {stage} and layer {i} of stage {stage_of(i)} share the parameter '{first}', and each stage "
                    "would train its own copy; give them as TiedLayerSpecs of one key"
                )
    last = stage_of(len(layers) - 1)
    functions = [(f"layer {i}", stage_of(i), f) for i, f in enumerate(layers) if not isinstance(f, nn.Module | LayerSpec)]
    if loss_fn is not None and not isinstance(loss_fn, nn.Module):
        functions.append(("loss_fn", last, loss_fn))
    for what, stage, function in functions:
        for held in _held_by(function):
            found = [owners.get(p, ("no layer", None, "")) for p in held if p.requires_grad]
            # parameters of several layers: a whole model, of which the function may use what it likes
            if found and len({where for where, _, _ in found}) == 1 and found[0][1] != stage:
                raise ModelError(
                    f"{what} is a function that uses a parameter of {found[0][0]}, which stage {stage} does not have and would not "
                    "train; make it a module, or TiedLayerSpecs of one key"
                )


def _held_by(function: Any) -> list[list[nn.Parameter]]:
    """Parameters of what a function was bound to, closed over, or given beforehand."""
    held: list[Any] = []
    if isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    held.append(getattr(function, "__self__", None))
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # one that is still empty
            held.append(cell.cell_contents)
    modules = [list(value.parameters()) for value in held if isinstance(value, nn.Module)]
    return modules + [[value] for value in held if isinstance(value, nn.Parameter)]


def count_parameters(layer: Any) -> int:
    """Elements of a layer's parameters. A spec is built without memory for it, unless it looks at values as it is built."""
    if isinstance(layer, LayerSpec):
        spec = layer
        try:
            with torch.device("meta"):
                layer = spec.build()
        except (RuntimeError, NotImplementedError):
            with torch.random.fork_rng():
                layer = spec.build()
    return sum(p.numel() for p in layer.parameters()) if isinstance(layer, nn.Module) else 0
