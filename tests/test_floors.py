"""The floors of docs/architecture.md: no import points up, no cycle, whatever the form of the import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zeroengine"

# Beside the table: the root names everything lazily, and `utils` is public surface over the engine.
SURFACE = {"utils": 8}
# Packages that must not use all of what lies below them, with the floor that they may use.
LIMITS = {"launcher": 0}


def floor_table(text: str) -> dict[str, int]:
    """{"zero": 3, ...} from the rows "| 3 | `zero/` | ..." of the document."""
    table: dict[str, int] = {}
    for floor, names in re.findall(r"^\|\s*(\d+)\s*\|([^|]*)\|", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)/?`", names):
            table[name] = int(floor)
    return table


FLOORS = floor_table((ROOT / "docs" / "architecture.md").read_text()) | SURFACE


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root: Path) -> dict[str, Path]:
    return {module_name(p, root): p for p in sorted(root.rglob("*.py")) if "__pycache__" not in p.parts}


def imports(path: Path, name: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a module of the package in `path`: absolute, relative, inside functions, for
    type checking only, and `import_module` of a literal name. `from a import b` is a.b where that is a module."""
    root = name.split(".")[0]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            targets = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for target in targets:
            if target.split(".")[0] == root:
                yield getattr(node, "lineno", 0), target


def floor_of(module: str, floors: dict[str, int]) -> int | None:
    parts = module.split(".")
    return floors.get(parts[1]) if len(parts) > 1 else None


def violations(root: Path, floors: dict[str, int], limits: dict[str, int]) -> list[str]:
    known, found = modules(root), []
    for name, path in known.items():
        if name == root.name:
            continue
        mine = floor_of(name, floors)
        if mine is None:
            found.append(f"{name} has no floor in docs/architecture.md")
            continue
        own = name.split(".")[1]
        for line, target in imports(path, name, set(known)):
            where = f"{name}:{line} (floor {mine}) imports {target}"
            if target == root.name:
                if "__version__" not in path.read_text().splitlines()[line - 1]:
                    found.append(f"{where}: the root only re-exports; import from where the name is defined")
                continue
            theirs = floor_of(target, floors)
            if theirs is None:
                found.append(f"{where}, which has no floor")
            elif theirs > mine:
                found.append(f"{where} (floor {theirs}): up")
            elif target.split(".")[1] != own and theirs > limits.get(own, theirs):
                found.append(f"{where} (floor {theirs}): {own} may use floor {limits[own]} only")
    return found


def cycle(root: Path) -> list[str] | None:
    """One cycle of imports, as a list of modules that starts and ends with the same one."""
    known = modules(root)
    graph = {n: {t for _, t in imports(p, n, set(known)) if t in known and t != n} for n, p in known.items() if n != root.name}
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> list[str] | None:
        state[node] = 1
        path.append(node)
        for after in sorted(graph.get(node, ())):
            if state.get(after) == 1:
                return [*path[path.index(after) :], after]
            if after not in state and (found := visit(after)):
                return found
        path.pop()
        state[node] = 2
        return None

    for name in graph:
        if name not in state and (found := visit(name)):
            return found
    return None


def test_every_floor_is_in_the_table() -> None:
    assert FLOORS["errors"] == 0 and FLOORS["zero"] == 3 and FLOORS["engine"] == 8 and FLOORS["launcher"] == 9
    top = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__"}
    assert top <= set(FLOORS), f"no floor in docs/architecture.md: {sorted(top - set(FLOORS))}"


def test_no_import_points_up() -> None:
    assert not violations(PACKAGE, FLOORS, LIMITS)


def test_no_cycle() -> None:
    assert (found := cycle(PACKAGE)) is None, " -> ".join(found)


FLOORS_OF_SAMPLE = {"low": 0, "high": 1, "edge": 2}


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("low.py", "import pkg.high", "up"),
        ("low.py", "from pkg import high", "up"),
        ("low.py", "from .high import a", "up"),
        ("low.py", "def f():\n    from . import high", "up"),
        ("low.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.high import b", "up"),
        ("low.py", "import importlib\nimportlib.import_module('pkg.edge.a')", "up"),
        ("low.py", "from pkg import name", "the root only re-exports"),
        ("edge/a.py", "from ..high import b", "may use floor 0 only"),
        ("other.py", "x = 1", "has no floor"),
        ("high.py", "from pkg import low", ""),
        ("edge/b.py", "from .a import x\nfrom ..low import y\nfrom pkg import __version__", ""),
    ],
)
def test_the_check_sees_every_form_of_import(tmp_path: Path, file: str, line: str, fault: str) -> None:
    root = tmp_path / "pkg"
    (root / "edge").mkdir(parents=True)
    for name in ("__init__.py", "low.py", "high.py", "edge/__init__.py", "edge/a.py"):
        (root / name).write_text("")
    (root / file).write_text(line)
    found = violations(root, FLOORS_OF_SAMPLE, {"edge": 0})
    assert (len(found) == 1 and fault in found[0]) if fault else not found


def test_the_check_sees_a_cycle(tmp_path: Path) -> None:
    root = tmp_path / "pkg"
    root.mkdir()
    for name, text in {
        "__init__": "",
        "a": "from . import b",
        "b": "def f():\n    import pkg.c",
        "c": "from .a import x",
    }.items():
        (root / f"{name}.py").write_text(text)
    assert cycle(root) == ["pkg.a", "pkg.b", "pkg.c", "pkg.a"]
    (root / "c.py").write_text("")
    assert cycle(root) is None
