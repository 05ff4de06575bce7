"""Small libraries and compilers for the tests of the builder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from zeroengine.ops.pages import large_page
from zeroengine.ops.sources import Sources
from zeroengine.ops.toolchain import Compiler, find_cxx

REAL = shutil.which("g++") or shutil.which("c++") or "c++"
FLAGS = ("-shared", "-fPIC", "-O0")


def compiler_works() -> bool:
    """Whether the C++ compiler that the package would use can build an empty library."""
    found = find_cxx()
    if isinstance(found, str):
        return False
    command = [*found.command, *FLAGS, "-fopenmp", "-x", "c++", "/dev/null", "-o", "/dev/null"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


NEEDS_COMPILER = pytest.mark.skipif(not compiler_works(), reason="needs a C++ compiler that works")


def tiny_sources(folder: Path, answer: int = 42, name: str = "tiny") -> Sources:
    """A library of one function `answer()` in `folder`/csrc."""
    (folder / "csrc" / name).mkdir(parents=True, exist_ok=True)
    (folder / "csrc" / "shared.h").write_text(f"#define ANSWER {answer}\n")
    (folder / "csrc" / name / f"{name}.cpp").write_text('#include "shared.h"\nextern "C" int answer() { return ANSWER; }\n')
    return Sources(folder / "csrc", name)


def counting_compiler(folder: Path, before: str = "") -> tuple[Compiler, Path]:
    """A compiler that writes a line to a file each time it links, after the shell commands `before`; and that file."""
    count = folder / "count"
    script = folder / "counting-cxx"
    script.write_text(f'#!/bin/sh\n{before}\ncase "$*" in *" -c "*) ;; *" -o "*) echo link >> {count};; esac\nexec {REAL} "$@"\n')
    script.chmod(0o755)
    return Compiler((str(script),), "counting"), count


def links(count: Path) -> int:
    return len(count.read_text().splitlines()) if count.exists() else 0


needs_large_pages = pytest.mark.skipif(not large_page(), reason="the system has no large pages")


def advised(address: int) -> bool:
    """Whether the mapping that holds `address` asks for large pages."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(x, 16) for x in head.split("-"))
            here = begin <= address < end
        elif here and line.startswith("VmFlags:"):
            return " hg" in line
    raise AssertionError(f"{address:#x} is in no mapping")
