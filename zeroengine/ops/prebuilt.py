"""Libraries that were built with the package (`ZE_BUILD_OPS=1 pip install .`). Imports no torch.

They are built for a baseline, not for the machine that built them, and are used only where they belong to the sources beside
them and the CPU has all that they need.
"""

from __future__ import annotations

import json
from pathlib import Path

from zeroengine.ops.compile import compile_library, is_whole
from zeroengine.ops.sources import Sources
from zeroengine.ops.toolchain import Compiler, cpu_features, cxx_flags, portable

_FOLDER = Path(__file__).resolve().parent / "prebuilt"


def find(sources: Sources, folder: Path = _FOLDER) -> Path | None:
    """The library, if there is one that fits the sources and this CPU."""
    try:
        about = json.loads((folder / f"{sources.name}.json").read_text())
    except (OSError, ValueError):
        return None
    path = folder / f"{sources.name}.so"
    fits = about.get("sources") == sources.digest and set(about.get("needs", ())) <= set(cpu_features())
    return path if fits and path.is_file() and is_whole(path) else None


def build(sources: Sources, compiler: Compiler, folder: Path) -> Path:
    """Builds a library of C++ sources into `folder`. Raises CompileError, or OSError from writing."""
    target = portable()
    work = folder / f".{sources.name}"
    work.mkdir(parents=True, exist_ok=True)
    made = work / f"{sources.name}.so"
    compile_library(sources, compiler, cxx_flags(target), made)
    final = folder / made.name
    made.replace(final)
    about = {"sources": sources.digest, "needs": list(target.needs), "compiler": compiler.version.partition("\n")[0]}
    (folder / f"{sources.name}.json").write_text(json.dumps(about, indent=1) + "\n")
    for left in work.iterdir():
        left.unlink()
    work.rmdir()
    return final
