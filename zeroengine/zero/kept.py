"""Modules that stay in fp32 in a model whose weights are 16-bit: routers, norms, whatever the user names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroengine.comm.protocol import Communicator
from zeroengine.errors import ConfigError


def kept_modules(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost modules with one of `names`: a part of the path ("router"), or the whole path, where * stands for
    anything ("model.layers.*.norm")."""
    found: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        if path and not any(path.startswith(f"{outer}.") for outer in found) and any(_named(path, name) for name in names):
            found[path] = child
    return found


def check_names(module: nn.Module, names: Sequence[str], control: Communicator | None = None) -> None:
    """Raises `ConfigError` for a name that no module has: what it was meant for would be 16-bit. `control`: over ranks that hold
    other modules, of which one must have the name; collective then."""
    paths = [path for path, _ in module.named_modules() if path]
    found = torch.tensor([any(_named(path, name) for path in paths) for name in names], dtype=torch.int64)
    if control is not None and names:
        found = control.exchange(found, "modules that stay in fp32").amax(0)
    idle = [name for name, there in zip(names, found.tolist(), strict=True) if not there]
    if idle:
        raise ConfigError(
            f"data_types.keep_in_fp32_modules: no module of {type(module).__name__} is called {', '.join(map(repr, idle))}; give a "
            "part of its path (router), or the whole path, where * stands for anything (model.layers.*.norm)"
        )


def _named(path: str, name: str) -> bool:
    return name in path.split(".") or fnmatchcase(path, name)


def compute_in_fp32(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[Any]:
    """Makes each module compute in fp32 and give its floating-point results in the type of its inputs (of `dtype`, if none of them
    is floating-point), so that a 16-bit model around it needs no change. Yields handles to take this off."""
    for module in modules:
        hook = _InFp32(dtype)
        yield module.register_forward_pre_hook(hook.before, with_kwargs=True)
        yield module.register_forward_hook(hook.after, always_call=True)


class _InFp32:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._given: list[torch.dtype] = []  # of the calls under way

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        kinds = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        self._given.append(next((k for k in kinds if k is self._dtype), kinds[0] if kinds else self._dtype))
        return _cast((args, kwargs), self._dtype, torch.float32)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        given = self._given.pop()
        return _cast(output, torch.float32, self._dtype) if given is self._dtype else output


def _cast(tree: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(target) if isinstance(x, Tensor) and x.dtype is source else x, tree)
