"""Makes `deepspeed` and its submodules importable, from the table in `surface.py`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.standin.surface import FALLBACKS, NAMES, REFUSED_CALLS, REFUSED_MODULES, VERSION

MARK = "__zeroengine__"
_ROOT = "deepspeed"
_REMEDY = "put `import zeroengine.integrations.deepspeed` at the top of the program, or start it with `zerorun --as-deepspeed`"


class StandInError(ZeroEngineError, ImportError):
    """The stand-in cannot be installed any more, or the program asks of it what only the real package has."""


class StandInModule(ModuleType):
    """A module of the stand-in. Names are resolved when they are first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in NAMES[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _resolve(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> Iterable[str]:
        children = (m.rpartition(".")[2] for m in NAMES if m.rpartition(".")[0] == self.__name__)
        return sorted({*super().__dir__(), *NAMES.get(self.__name__, ()), *children})


def _resolve(module: str, name: str) -> Any:
    path = f"{module}.{name}"
    target = NAMES[module].get(name)
    if isinstance(target, str):
        where, colon, attribute = target.partition(":")
        found = importlib.import_module(where)
        return getattr(found, attribute) if colon else found
    if target is not None:
        return target[0]
    if path in NAMES:
        return importlib.import_module(path)
    if path in REFUSED_CALLS:
        return _refusal(path, REFUSED_CALLS[path])
    for fallback in FALLBACKS.get(module, ()):
        found = importlib.import_module(fallback)
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(
        f"zeroengine, which answers to the name deepspeed in this process, has no {path}; docs/migration.md lists what it has"
    )


def _refusal(path: str, reason: str) -> Callable[..., NoReturn]:
    """What stands for a function or class that is not here: there to be imported, an error when it is used."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise StandInError(f"{path}: {reason}")

    refused.__name__ = refused.__qualname__ = path.rpartition(".")[2]
    refused.__doc__ = f"Refused: {reason}"
    return refused


class _Metadata(importlib.metadata.Distribution):
    """The distribution `deepspeed`, for programs that look for its version."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        summary = "zeroengine, answering to the name deepspeed"
        return f"Metadata-Version: 2.1\nName: {_ROOT}\nVersion: {VERSION}\nSummary: {summary}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return Path(__file__).parent / path


class StandInFinder(importlib.metadata.DistributionFinder, Loader):
    """Finds the modules of the table, says why others are not there, and answers for the distribution."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _ROOT and not fullname.startswith(f"{_ROOT}."):
            return None
        if fullname in NAMES:
            return ModuleSpec(fullname, self, origin="zeroengine.integrations.standin", is_package=True)
        parts = fullname.split(".")
        above = (".".join(parts[:i]) for i in range(len(parts), 1, -1))
        reason = next((REFUSED_MODULES[m] for m in above if m in REFUSED_MODULES), None)
        told = reason or "zeroengine, which answers to the name deepspeed in this process, has no such module"
        raise ModuleNotFoundError(f"{fullname}: {told}", name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = StandInModule(spec.name, f"zeroengine in the place of {spec.name}.")
        setattr(module, MARK, True)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are resolved on use."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        name = context.name if context is not None else None
        return [_Metadata()] if name is None or name.lower().replace("_", "-") == _ROOT else []


def install() -> None:
    """Makes `import deepspeed` give the stand-in; a second call does nothing.

    Raises `StandInError` if the real package is imported already, or transformers settled that there is none."""
    present = sys.modules.get(_ROOT)
    if present is not None and not getattr(present, MARK, False):
        where = getattr(present, "__file__", None) or "unknown place"
        raise StandInError(
            f"the real deepspeed is imported already (from {where}), and objects of both would meet in one program; {_REMEDY}, "
            "before anything imports deepspeed"
        )
    _check_transformers()
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())
    if not isinstance(present, StandInModule):
        sys.modules.pop(_ROOT, None)
        importlib.import_module(_ROOT)


def _check_transformers() -> None:
    """transformers decides when it is imported whether its classes know DeepSpeed."""
    settled = sys.modules.get("transformers.integrations.deepspeed")
    if settled is not None and getattr(settled, "DeepSpeedConfig", None) is object:
        raise StandInError(f"transformers was imported before zeroengine's stand-in, and found no deepspeed; {_REMEDY}")
