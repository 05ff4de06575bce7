"""From what users write to canonical spellings: known keys are renamed, old forms rewritten, unknown keys reported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from zeroengine.config.foreign import OLD_FORMS
from zeroengine.config.keys import KeyTable, is_comment
from zeroengine.config.spec import KeySpec, Kind
from zeroengine.config.values import plain_flag, plain_number, show

AUTO = "auto"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; `path` is spelled as the user spells it."""

    path: str
    kind: Literal["unknown", "refused", "invalid", "auto"]
    text: str


@dataclass
class Canonical:
    """The result of reading: `values` by canonical path, and how each was spelled."""

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    ignored: list[KeySpec] = field(default_factory=list)

    def spelled(self, path: str) -> str:
        """`path` as the user wrote it."""
        return ".".join(self.location(path))

    def location(self, path: str) -> tuple[str, ...]:
        """The keys that lead to `path` in what the user wrote."""
        head, tail = path, ""
        while head and head not in self.written:
            head, _, last = head.rpartition(".")
            tail = f"{last}.{tail}" if tail else last
        return (*self.written.get(head, ()), *(tail.split(".") if tail else ()))


def canonical(values: dict[str, Any], table: KeyTable) -> Canonical:
    """Reads `values` against `table`. Nothing is raised: what is wrong is in `problems`."""
    result = Canonical()
    reader = _Reader(table, result, strict=plain_flag(values.get("strict", True)) is not False)
    result.values = reader.section(values, (), "")
    _old_forms(result)
    section = result.values.get("tensor_parallel")
    _degree(result, section.get("autotp_size") if isinstance(section, dict) else None, "tensor_parallel.autotp_size", "tp")
    _degree(result, result.values.get("sequence_parallel_size"), "sequence_parallel_size", "cp")
    return result


class _Reader:
    def __init__(self, table: KeyTable, result: Canonical, strict: bool) -> None:
        self._table = table
        self._result = result
        self._strict = strict

    def section(self, values: dict[str, Any], location: tuple[str, ...], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in values.items():
            if is_comment(name):
                continue
            here = (*location, name)
            path = self._table.spellings.get(prefix + name, prefix + name)
            row = self._table.get(path)
            if row is None:
                self._unknown(".".join(here), prefix + name)
            elif path in self._result.written:
                other = ".".join(self._result.written[path])
                text = f"is another spelling of `{other}`, which is also given; keep one"
                self._result.problems.append(Problem(".".join(here), "invalid", text))
            else:
                self._result.written[path] = here
                self._keep(kept, row, value, here)
        return kept

    def _keep(self, kept: dict[str, Any], row: KeySpec, value: Any, here: tuple[str, ...]) -> None:
        if row.section and value is None:
            return
        self._judge(row, value)
        if row.section and not row.open and isinstance(value, dict):
            kept[row.name] = self.section(value, here, row.path + ".")
            return
        kept[row.name] = copy.deepcopy(value)
        if row.open and isinstance(value, dict):
            for name, child in value.items():
                below = self._table.get(f"{row.path}.{name}")
                if below is None or below.kind is Kind.HONOURED:
                    continue
                self._result.written[below.path] = (*here, name)
                self._judge(below, child)
                kept[row.name].pop(name)  # nobody below knows it

    def _judge(self, row: KeySpec, value: Any) -> None:
        if row.kind is Kind.HONOURED or value == AUTO or not row.asks(value):
            return
        if row.kind is Kind.IGNORED:
            self._result.ignored.append(row)
        else:
            path = self._result.spelled(row.path)
            self._result.problems.append(Problem(path, "refused", f"is refused: {row.reason}"))

    def _unknown(self, written: str, path: str) -> None:
        advice = self._table.advice(path)
        if self._strict:
            self._result.problems.append(Problem(written, "unknown", f"is not a key; {advice}"))
        else:
            self._result.unknown.append(f"`{written}` ({advice})")


def _old_forms(result: Canonical) -> None:
    """`zero_optimization: true`, `cpu_offload: true`, `cpu_offload_param: true`."""
    zero = result.values.get("zero_optimization")
    if isinstance(zero, bool):
        result.values["zero_optimization"] = {"stage": int(zero)}
        return
    if not isinstance(zero, dict):
        return
    for name, target in OLD_FORMS.items():
        if name not in zero:
            continue
        value = zero.pop(name)
        flag, spelled = plain_flag(value), result.spelled(f"zero_optimization.{name}")
        if value is None or value == AUTO:
            continue
        if flag is None:
            result.problems.append(Problem(spelled, "invalid", f"expected true or false, got {show(value)}"))
        elif target in zero:
            other = result.spelled(f"zero_optimization.{target}")
            text = f"is the old form of `{other}`, which is also given; remove it"
            result.problems.append(Problem(spelled, "invalid", text))
        elif flag:
            zero[target] = {"device": "cpu"}


def _degree(result: Canonical, value: Any, path: str, dim: str) -> None:
    """`path`, which has `value`, is another place to write `mesh.<dim>`."""
    size = plain_number(value)
    if size is None or size <= 1 or isinstance(size, float) and not size.is_integer():
        return
    mesh = result.values.setdefault("mesh", {})
    if not isinstance(mesh, dict):
        return
    given = mesh.setdefault(dim, int(size))
    if given != AUTO and plain_number(given) != size:
        text = f"is {size} while `mesh.{dim}` is {show(given)}; keep one of them"
        result.problems.append(Problem(result.spelled(path), "invalid", text))
    mesh[dim] = int(size)


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Path, value and holder of every value that is not an object. The holder may be changed meanwhile."""
    for name, value in list(values.items()):
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, values
