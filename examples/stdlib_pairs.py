"""Real training data without a download: (function source, docstring) pairs from Python's own standard library.

Every machine that runs Python has a few thousand documented functions on its disk. A pair asks a language model for
the docstring, given the source without it. The order is deterministic and no source and no docstring occurs twice.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from text_data import Pair

PROMPT = "Python function:\n{source}\n\nDocstring:\n"
SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "__pycache__"})
MAX_SOURCE_CHARS = 2000  # a longer function fits no small context, and cutting it would hide what is asked for


def library_files(root: Path) -> Iterator[Path]:
    """Python files under `root` in a fixed order, without tests, installed packages and the editor's own code."""
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            yield path


def documented_functions(code: str) -> Iterator[tuple[str, str]]:
    """(source without its docstring, docstring) of every function and method in `code`, in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules with odd escapes are no concern of the reader
        tree = ast.parse(code)
    lines = code.splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda node: node.lineno):
        docstring = ast.get_docstring(node, clean=False)
        if not docstring or len(node.body) < 2:  # undocumented, or nothing but documentation
            continue
        first = node.body[0]
        if first.lineno == node.lineno or first.end_lineno is None:  # on the line of its `def`: cannot be cut out
            continue
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        kept = lines[start - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
        yield textwrap.dedent("\n".join(kept)).strip(), inspect.cleandoc(docstring)


def stdlib_pairs(root: Path | None = None) -> list[Pair]:
    """All pairs of the standard library at `root` (this interpreter's by default).

    A pair's group is its top-level module or package, so that siblings such as `asyncio.events` and `asyncio.tasks`
    stay on one side of the split between training and held-out pairs.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    pairs: list[Pair] = []
    seen: set[str] = set()
    for path in library_files(root):
        try:
            found = list(documented_functions(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a file kept broken on purpose, or written in another encoding
        group = path.relative_to(root).parts[0].removesuffix(".py")
        for source, docstring in found:
            if len(source) > MAX_SOURCE_CHARS or source in seen or docstring in seen:
                continue
            seen.update((source, docstring))
            pairs.append(Pair(PROMPT.format(source=source), docstring, group))
    return pairs
