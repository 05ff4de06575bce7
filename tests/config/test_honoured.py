"""A key that the table calls honoured is read somewhere."""

from __future__ import annotations

import ast
from pathlib import Path

from zeroengine.config import Config
from zeroengine.config.spec import Kind

PACKAGE = Path(__file__).parent.parent.parent / "zeroengine"
# Read by a name in a variable, and before there is a typed configuration.
BY_NAME = {"mesh.pp", "mesh.cp", "mesh.tp", "mesh.ep", "strict", "tensor_parallel.autotp_size", "sequence_parallel_size"}


def names_read() -> set[str]:
    """Names that are read as attributes anywhere in the package."""
    return {
        node.attr
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def typed_fields() -> set[str]:
    """Paths of the fields of `Config` and its sections."""
    found: set[str] = set()
    todo = [("", Config)]
    while todo:
        prefix, model = todo.pop()
        for name, info in model.model_fields.items():
            found.add(prefix + name)
            factory = info.default_factory
            if isinstance(factory, type) and hasattr(factory, "model_fields"):
                todo.append((f"{prefix}{name}.", factory))
    return found


def test_every_honoured_key_is_read() -> None:
    read, fields = names_read(), typed_fields()
    rows = [r for r in Config.keys().values() if r.kind is Kind.HONOURED and r.path in fields and not r.section]
    assert len(rows) > 40
    unread = [r.path for r in rows if r.name not in read and r.path not in BY_NAME]
    assert not unread, f"honoured but read by nobody: {unread}"
