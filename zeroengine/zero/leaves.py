"""Subtrees of a model whose sharded values are gathered together: gather units.

Which experts run depends on the data, so ranks would gather different ones. In a unit every use of a part gathers the whole,
on all ranks alike. Units are marked by the user (`set_z3_leaf_modules`), named in `zero_optimization.leaf_module`, and
found by default where a module has a list of equal modules called `experts`: a unit costs memory, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zeroengine.errors import ConfigError

MARK = "_zero_leaf"
_EXPERTS = "experts"


def find_leaves(module: nn.Module, wanted: Mapping[str, Any] | None = None) -> dict[str, list[nn.Module]]:
    """Gather units by name: the outermost marked modules, and lists of experts outside of them. `wanted` has `classes`
    (names, with or without the module's path), `names` (paths of modules) and `name_suffixes`."""
    chosen = dict(wanted or {})
    classes, names, suffixes = (frozenset(chosen.pop(k, None) or ()) for k in ("classes", "names", "name_suffixes"))
    if chosen:
        raise ConfigError(
            f"zero_optimization.leaf_module has the unknown keys {', '.join(sorted(chosen))}; known are classes, names and name_suffixes"
        )
    found: dict[str, list[nn.Module]] = {}
    unseen = set(names)
    around = _around_experts(module)
    for name, child in module.named_modules():
        unseen.discard(name)
        inside = any(name.startswith(f"{leaf}.") or not leaf for leaf in found)
        marked = getattr(child, MARK, False) is True or name in names or is_of(child, classes)
        if inside or not (marked or any(name.endswith(s) for s in suffixes) or name in around):
            continue
        found[name] = list(child.modules())
    if unseen:
        raise ConfigError(f"zero_optimization.leaf_module.names: the model has no module {', '.join(sorted(unseen))}; correct or remove it")
    return found


def is_of(module: nn.Module, classes: Iterable[str]) -> bool:
    """Whether the module's class has one of these names: "Block" or "package.file.Block"."""
    kind = type(module)
    return kind.__name__ in classes or f"{kind.__module__}.{kind.__qualname__}" in classes


def _around_experts(module: nn.Module) -> frozenset[str]:
    """Names of the blocks that have experts, or of the list itself where it is the smaller part of what is around it: what a
    block does beside its experts (a router) may be recomputed with them, and so belongs to them."""
    found = set()
    for name, child in module.named_modules():
        if _are_experts(name, child):
            outer = name.rpartition(".")[0]
            mine, whole = _size(child), _size(module.get_submodule(outer))
            found.add(outer if outer and whole < 2 * mine else name)
    return frozenset(found)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _are_experts(name: str, child: nn.Module) -> bool:
    return (
        isinstance(child, nn.ModuleList)
        and name.rpartition(".")[2] == _EXPERTS
        and len(child) > 1
        and len({type(expert) for expert in child}) == 1
    )
