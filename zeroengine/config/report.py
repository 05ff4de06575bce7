"""What each key of a file does, and the page of documentation, both from the table of keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zeroengine.config.canonical import is_comment
from zeroengine.config.config import Config, Examined, examine
from zeroengine.config.differences import DIFFERENCES
from zeroengine.config.foreign import OLD_FORMS
from zeroengine.config.keys import KeyTable
from zeroengine.config.spec import KeySpec, Kind

ReportKind = Literal["honoured", "ignored", "refused", "unknown", "invalid", "auto", "comment"]


@dataclass(frozen=True)
class KeyReport:
    """One key of a configuration: what it is set to and what becomes of it. `effective` is the value that the engine
    reads (of honoured keys, if the configuration is accepted)."""

    path: str
    value: Any
    kind: ReportKind
    text: str
    effective: Any = None


def describe(source: str | os.PathLike[str] | Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> list[KeyReport]:
    """A report for every key in `source`, in its order. Raises `ConfigError` only if it cannot be read at all."""
    return reports_of(examine(source, facts or {}))


def reports_of(examined: Examined) -> list[KeyReport]:
    """The same for what was read already."""
    table = Config.keys()
    reports: list[KeyReport] = []
    _describe(examined.as_given, "", examined, table, reports)
    told = {report.path for report in reports}
    for problem in examined.problems:
        if problem.path not in told:
            reports.append(KeyReport(problem.path, None, problem.kind, problem.text))
    return reports


def _describe(values: Mapping[str, Any], prefix: str, examined: Examined, table: KeyTable, reports: list[KeyReport]) -> None:
    problems = {problem.path: problem for problem in examined.problems}
    ignored = {examined.read.spelled(row.path): row for row in examined.read.ignored}
    for name, value in values.items():
        path = prefix + name
        row = table.get(table.spellings.get(path, path)) or _by_location(path, examined, table)
        if path in problems:
            reports.append(KeyReport(path, value, problems[path].kind, problems[path].text))
        elif path in ignored:
            reports.append(KeyReport(path, value, "ignored", ignored[path].reason))
        elif is_comment(name):
            reports.append(KeyReport(path, value, "comment", "not read"))
        elif row is None and _in_open(path, table):
            text = "given on as it is"
            reports.append(KeyReport(path, value, "honoured", text, _value_at(path, examined)))
        elif row is None:
            reports.append(KeyReport(path, value, "unknown", table.advice(path)))
        elif isinstance(value, Mapping) and value and (not row.open or row.kind is Kind.HONOURED):
            _describe(value, path + ".", examined, table, reports)
        elif row.kind is Kind.HONOURED:
            reports.append(KeyReport(path, value, "honoured", row.meaning, _effective(row, examined)))
        else:
            reports.append(KeyReport(path, value, "ignored", "asks for nothing here"))


def _effective(row: KeySpec, examined: Examined) -> Any:
    """What the engine reads for a key; None if the configuration is refused."""
    return _value_at(_home(row.path), examined)


def _in_open(path: str, table: KeyTable) -> bool:
    """Whether `path` lies directly in a section that takes any key (`optimizer.params`)."""
    row = table.get(path.rpartition(".")[0])
    return row is not None and row.open


def _value_at(path: str, examined: Examined) -> Any:
    found: Any = examined.config
    for name in path.split("."):
        if found is None:
            return None
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return found


def _home(path: str) -> str:
    """Where the value of an old form is found."""
    section, _, name = path.rpartition(".")
    return f"{section}.{OLD_FORMS[name]}.device" if section == "zero_optimization" and name in OLD_FORMS else path


def _by_location(path: str, examined: Examined, table: KeyTable) -> KeySpec | None:
    """The row of a key below a section that is spelled differently (`bfloat16.enabled`)."""
    for canonical, location in examined.read.written.items():
        if ".".join(location) == path:
            return table.get(canonical)
    return None


def markdown(table: KeyTable) -> str:
    """The documentation of all keys, as Markdown."""
    lines = [
        "# Configuration keys",
        "",
        "<!-- Made from the table of keys by zeroengine.config.report.markdown; do not edit. -->",
        "",
        "A key is *honoured*; or *ignored*: it cannot change the result, has no effect here, and one warning names",
        "all such keys that ask for something; or *refused*: it would change the result, and asking for it is an",
        "error. Any other key is an error that names the nearest one, unless `strict` is false; keys that start with",
        '`_`, `x-`, `//`, `#` or `$`, and `comment`, are remarks. `"auto"` is filled where the answer is known and',
        "an error where it is not.",
        "",
    ]
    sections = [""] + [row.path for row in table.values() if row.section and not row.open and row.kind is Kind.HONOURED]
    for section in sections:
        rows = [row for row in table.values() if row.parent == section and (section or row.kind is Kind.HONOURED)]
        lines += [f"## {f'`{section}`' if section else 'Top level'}", ""]
        if section:
            lines += [table[section].meaning, ""]
        lines += ["| key | type | default | class | meaning |", "|---|---|---|---|---|", *map(_line, rows), ""]
    lines += ["## Known keys of DeepSpeed without a place here", ""]
    lines += ["| key | class | meaning | why |", "|---|---|---|---|"]
    for row in table.values():
        if not row.parent and row.kind is not Kind.HONOURED:
            lines.append(f"| `{row.path}` | {row.kind.value} | {row.meaning} | {row.reason} |")
    lines += ["", "## Where an absent key means something else than in DeepSpeed 0.19.8", ""]
    lines += ["| key | here | DeepSpeed 0.19.8 | why |", "|---|---|---|---|"]
    lines += [f"| `{d.path}` | {d.here} | {d.deepspeed} | {d.why} |" for d in DIFFERENCES]
    lines += ["", "A file can be examined without running it: `zerorun config check FILE` says what each key does."]
    return "\n".join(lines) + "\n"


def _line(row: KeySpec) -> str:
    other = f" Also `{'`, `'.join(row.spellings)}`." if row.spellings else ""
    new = " New here." if row.ours else ""
    why = f" *{row.reason[:1].upper()}{row.reason[1:]}.*" if row.reason else ""
    default = f"`{row.default}`" if row.default else ""
    return f"| `{row.name}` | {row.type} | {default} | {row.kind.value} | {row.meaning}{other}{new}{why} |"
