"""House rules that a program can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for p in (ROOT / "zeroengine").rglob("*.py") if "__pycache__" not in p.parts)


def faults(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"line {node.lineno}: print()")
        elif isinstance(node, ast.Assert):
            found.append(f"line {node.lineno}: assert, which `python -O` removes")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"line {node.lineno}: bare except")
        elif isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            found.append(f"line {node.lineno}: import *")
    return found


def test_sources_keep_the_house_rules() -> None:
    assert SOURCES
    assert not [f"{p.relative_to(ROOT)} {fault}" for p in SOURCES for fault in faults(p.read_text())]


@pytest.mark.parametrize("text", ["print(1)", "assert x", "try:\n    f()\nexcept:\n    pass", "from a import *"])
def test_the_check_sees(text: str) -> None:
    assert len(faults(text)) == 1


HEAVY = ("torch", "numpy", "transformers", "pydantic")


@pytest.mark.parametrize("module", ["zeroengine", "zeroengine.launcher", "zeroengine.launcher.cli", "zeroengine.errors"])
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; sys.exit(' '.join(m for m in {HEAVY!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"import {module} imports {done.stderr}"


def test_help_of_zerorun_does_not_import_torch() -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "bin" / "zerorun"), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--nproc" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "zeroengine.launcher.cli" in imported
    assert not imported & set(HEAVY)
