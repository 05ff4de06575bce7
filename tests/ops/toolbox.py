"""Small libraries and compilers for the tests of the builder."""

from __future__ import annotations

import shutil
from pathlib import Path

from zeroengine.ops.sources import Sources
from zeroengine.ops.toolchain import Compiler

REAL = shutil.which("g++") or shutil.which("c++") or "c++"
FLAGS = ("-shared", "-fPIC", "-O0")


def tiny_sources(folder: Path, answer: int = 42, name: str = "tiny") -> Sources:
    """A library of one function `answer()` in `folder`/csrc."""
    (folder / "csrc" / name).mkdir(parents=True, exist_ok=True)
    (folder / "csrc" / "shared.h").write_text(f"#define ANSWER {answer}\n")
    (folder / "csrc" / name / f"{name}.cpp").write_text(
        '#include "shared.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    return Sources(folder / "csrc", name)


def counting_compiler(folder: Path, before: str = "") -> tuple[Compiler, Path]:
    """A compiler that writes a line to a file each time it links, after the shell commands `before`; and that file."""
    count = folder / "count"
    script = folder / "counting-cxx"
    script.write_text(
        f'#!/bin/sh\n{before}\ncase "$*" in *" -c "*) ;; *" -o "*) echo link >> {count};; esac\nexec {REAL} "$@"\n'
    )
    script.chmod(0o755)
    return Compiler((str(script),), "counting"), count


def links(count: Path) -> int:
    return len(count.read_text().splitlines()) if count.exists() else 0
