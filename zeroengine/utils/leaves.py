"""Marks modules whose parameters stage 3 gathers as one unit, see `zeroengine.zero.leaves`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zeroengine.errors import ModelError
from zeroengine.zero.leaves import MARK, is_of
from zeroengine.zero.residency import slot_of


def set_z3_leaf_module(model: nn.Module, flag: bool = True) -> None:
    """Makes `model` itself one gather unit, or none with `flag=False`. Before `zeroengine.initialize`."""
    for name, p in model.named_parameters():
        if slot_of(p) is not None:
            raise ModelError(
                f"gather units must be marked before zeroengine.initialize: parameter '{name}' of {type(model).__name__} belongs "
                "to an engine already; call engine.destroy(), mark, and initialize again"
            )
    if flag:
        setattr(model, MARK, True)
    elif MARK in model.__dict__:
        delattr(model, MARK)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Makes every module in `model` of these classes (or names of classes) one gather unit: at stage 3 the parameters of all
    its submodules are gathered together, so that ranks may run different ones of them. Returns the modules. Before
    `zeroengine.initialize`. Raises `ModelError` if there is none."""
    return _mark(model, leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the marks of `set_z3_leaf_modules` off. Returns the modules."""
    return _mark(model, leaf_module_classes, raise_if_not_found, flag=False)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether `model` is marked as a gather unit."""
    return getattr(model, MARK, False) is True


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules in `model` that are marked as gather units."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _mark(model: nn.Module, classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool, *, flag: bool) -> list[nn.Module]:
    wanted = list(classes)
    types = tuple(c for c in wanted if isinstance(c, type))
    names = {c for c in wanted if isinstance(c, str)}
    found = [m for m in model.modules() if isinstance(m, types) or is_of(m, names)]
    if not found and raise_if_not_found:
        told = ", ".join(c if isinstance(c, str) else c.__name__ for c in wanted)
        raise ModelError(f"the model has no module of the classes {told or '(none given)'}; give the classes that it uses")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
