"""Builds native libraries on first use and loads them.

`csrc/<name>/*.cpp` (or `*.cu`) becomes one shared library with a plain C interface, called through ctypes: it includes no
header of torch or Python, so it compiles in seconds, fits every version of both, and calls release the GIL. (`heap`, which torch
itself calls, includes a few of torch's and belongs to the version that it was built with.) A library lies in the cache under a
name that holds a hash of all that shapes it (sources, headers, flags, compiler, CPU features, that version), so a build is never
stale and never rewritten.

Processes that start together build once: they queue on a lock that the kernel releases when its holder dies, whatever way it
dies. A library appears in the cache by renaming, whole. Where a library cannot be built, that is an answer with its reason,
not an error: every operation has a twin in torch.

Environment: ZE_CACHE_DIR (default ~/.cache/zeroengine/ops), CXX, CUDA_HOME, and ZE_OPS: `auto` (default), `twin` (native
libraries are neither built nor loaded) or `native` (an error where one is missing).

Imports no torch, unless such a library is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.logging import logger
from zeroengine.ops import prebuilt
from zeroengine.ops.against_torch import torch_flags
from zeroengine.ops.cache import BuildFailed, Cache
from zeroengine.ops.compile import is_whole
from zeroengine.ops.sources import Sources, csrc
from zeroengine.ops.toolchain import (
    Compiler,
    cpu_features,
    cxx_flags,
    find_cxx,
    find_nvcc,
    nvcc_flags,
    this_machine,
)

MODES = ("auto", "twin", "native")


@dataclass(frozen=True)
class Library:
    """A native library, or why there is none. `dll` is loaded, or None; `reason` is one readable line."""

    name: str
    dll: ctypes.CDLL | None
    reason: str
    path: Path | None = None
    quiet: bool = field(default=False, compare=False)

    def __bool__(self) -> bool:
        return self.dll is not None


def mode() -> str:
    """The value of ZE_OPS."""
    value = os.environ.get("ZE_OPS", "").strip().lower() or "auto"
    if value not in MODES:
        raise ConfigError(f"ZE_OPS={value}: it is one of {', '.join(MODES)}")
    return value


def cache_folder() -> Path:
    """Where libraries are kept. Raises RuntimeError where it is in a home that is not known."""
    chosen = os.environ.get("ZE_CACHE_DIR")
    try:
        return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "zeroengine" / "ops"
    except RuntimeError as error:
        raise RuntimeError(f"{error}; set ZE_CACHE_DIR") from error


def library(name: str, arch: str = "native") -> Library:
    """The library of `csrc/<name>`, built if need be; false in a condition where there is none.

    Says once, on each host, why a library is missing. Safe to call often: the answer is kept for the process as long as the
    environment that leads to it stays.

    Args:
        name: a folder of csrc.
        arch: for CUDA sources, the GPU they are built for (sm_90; native: the GPUs of this machine).

    Raises:
        ZeroEngineError: with ZE_OPS=native where the library is missing.
        ConfigError: ZE_OPS has another value.
    """
    wanted = mode()
    if wanted == "twin":
        return Library(name, None, "ZE_OPS=twin")
    settings = tuple(os.environ.get(v, "") for v in ("ZE_CACHE_DIR", "HOME", "CXX", "CUDA_HOME", "CUDA_PATH", "PATH"))
    found = _library(name, arch, settings)
    if wanted == "native" and not found:
        raise ZeroEngineError(f"ZE_OPS=native, and there is no native library '{name}': {found.reason}")
    return found


@functools.cache
def _library(name: str, arch: str, settings: tuple[str, ...]) -> Library:
    found = find(name, arch)
    if not found and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.log(
            logging.INFO if found.quiet else logging.WARNING,
            f"no native library '{name}', its operations run on torch: {found.reason}",
        )
    return found


def find(name: str, arch: str = "native") -> Library:
    """As `library`, without its memory, its message and ZE_OPS."""
    folder = csrc()
    if folder is None:
        return Library(name, None, "the sources (csrc) are not in this installation; install the package again")
    sources = Sources(folder, name)
    if not sources.units:
        raise ZeroEngineError(f"there is no native library '{name}': {folder / name} holds no .cpp and no .cu file")
    ready = prebuilt.find(sources)
    if ready is not None:
        try:
            return Library(name, _load(sources, ready), "built with the package", ready)
        except OSError:
            pass  # of another C library, say; what is built here fits
    compiler = find_nvcc() if sources.cuda else find_cxx()
    if isinstance(compiler, str):
        return Library(name, None, compiler, quiet=sources.cuda)
    flags = nvcc_flags(arch) if sources.cuda else cxx_flags(this_machine())
    if sources.with_torch:
        more = torch_flags()
        if isinstance(more, str):
            return Library(name, None, more)
        flags += more
    return _from_cache(sources, compiler, flags)


def _load(sources: Sources, path: Path) -> ctypes.CDLL:
    """Raises OSError where it cannot be loaded, or is something else."""
    dll = ctypes.CDLL(str(path))
    missing = [name for name in sources.functions if not hasattr(dll, name)]
    if missing:
        raise OSError(f"{path} has no function {missing[0]}")
    return dll


def _from_cache(sources: Sources, compiler: Compiler, flags: tuple[str, ...]) -> Library:
    try:
        cache = Cache(cache_folder())
    except RuntimeError as error:  # no home directory
        return Library(sources.name, None, str(error))
    key = sources.key(*compiler.command, compiler.version, *flags, *cpu_features(), *platform.libc_ver())
    for attempt in range(2):
        try:
            path = cache.get(sources, key, compiler, flags, again=attempt > 0)
        except BuildFailed as failed:
            return Library(sources.name, None, str(failed))
        try:
            if is_whole(path):
                return Library(sources.name, _load(sources, path), "built on this machine", path)
            problem = f"{path} is damaged"  # once more from the start
        except OSError as error:
            problem = str(error)
            break
    return Library(sources.name, None, f"it was built but cannot be loaded: {problem}; ZE_CACHE_DIR names another folder to build in")
