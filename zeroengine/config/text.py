"""Reads the JSON that users write: comments, missing or trailing commas, unquoted words, no outer braces.

The grammar is the part of Hjson that has one possible meaning. Where Hjson would take the rest of a line, commas and
all, for a string, this reader stops at the comma, or raises when the rest cannot be a value; a placeholder such as
`MB_SIZE` comes out as a string and fails later, at the key that wanted a number. Duplicate keys are an error.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from zeroengine.errors import ConfigError

_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_BARE_KEY = re.compile(r"[^\s,:{}\[\]\"']+")
_BARE_VALUE = re.compile(r"[^\n,}\]]*")
_TRAILING_COMMENT = re.compile(r"\s(?:#|//|/\*).*$")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$")
_SINGLE_QUOTED = re.compile(r"'((?:[^'\\\n]|\\.)*)'")
_WORDS: dict[str, Any] = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
    "Infinity": float("inf"), "-Infinity": float("-inf"), "inf": float("inf"), "-inf": float("-inf"),
    "NaN": float("nan"),
}  # fmt: skip
_MAX_DEPTH = 60


def parse(text: str, origin: str) -> dict[str, Any]:
    """The object in `text`. Raises `ConfigError` with `origin`, line and column where it cannot be read."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return _Reader(text, origin).document()
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ConfigError(f"{origin}: line 1, column 1: a configuration is an object {{...}}, not {kind}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses duplicates; the tolerant reader then finds where they are."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


class _Reader:
    """Recursive descent over `text`; `at` is the position of the next character."""

    def __init__(self, text: str, origin: str) -> None:
        self._text = text
        self._origin = origin
        self._at = 0
        self._path: list[str] = []
        self._depth = 0

    def document(self) -> dict[str, Any]:
        self._skip()
        braces = self._peek() == "{"
        if not braces and self._peek() == "[":
            self._fail("a configuration is an object {...}, not a list")
        if not self._peek():
            self._fail("the configuration is empty")
        if braces:
            self._at += 1
        result = self._members(closing="}" if braces else "")
        self._skip()
        if self._at < len(self._text):
            self._fail(f"unexpected text after the end of the object: {self._rest()!r}")
        return result

    def _members(self, closing: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not self._closed(closing):
            start = self._at
            key = self._key()
            if key in result:
                path = ".".join([*self._path, key])
                self._fail(f"`{path}` is given twice (first on line {lines[key]}); keep one of them", start)
            lines[key] = self._line(start)
            self._skip()
            if self._peek() != ":":
                self._fail(f"expected `:` after the key `{key}`")
            self._at += 1
            self._path.append(key)
            result[key] = self._value()
            self._path.pop()
            self._separator(closing)
        return result

    def _items(self) -> list[Any]:
        result: list[Any] = []
        while not self._closed("]"):
            result.append(self._value())
            self._separator("]")
        return result

    def _closed(self, closing: str) -> bool:
        """True, and past it, at the end of the object or list."""
        self._skip()
        if self._at >= len(self._text):
            if closing:
                self._fail(f"the file ends where `{closing}` or another entry is expected")
            return True
        if closing and self._peek() == closing:
            self._at += 1
            return True
        return False

    def _separator(self, closing: str) -> None:
        """A comma, or a line break, or the end."""
        before = self._at
        self._skip()
        if self._peek() == ",":
            self._at += 1
        elif self._peek() not in ("", closing) and "\n" not in self._text[before : self._at]:
            self._fail(f"expected `,` before {self._rest()!r}")

    def _key(self) -> str:
        if self._peek() in "\"'":
            return self._quoted()
        match = _BARE_KEY.match(self._text, self._at)
        if match is None:
            self._fail(f"expected a key, found {self._rest()!r}")
        self._at = match.end()
        return match.group()

    def _value(self) -> Any:
        self._skip()
        char = self._peek()
        if char in ("{", "["):
            if self._depth >= _MAX_DEPTH:
                self._fail("nested too deeply")
            self._at += 1
            self._depth += 1
            value = self._members("}") if char == "{" else self._items()
            self._depth -= 1
            return value
        if char and char in "\"'":
            return self._quoted()
        return self._bare()

    def _quoted(self) -> str:
        if self._peek() == '"':
            try:
                value, self._at = scanstring(self._text, self._at + 1, True)
            except json.JSONDecodeError as error:
                self._fail(error.msg.lower(), error.pos)
            return str(value)
        match = _SINGLE_QUOTED.match(self._text, self._at)
        if match is None:
            self._fail("a string that starts with ' does not end on its line")
        inner = match.group(1).replace("\\'", "'").replace('"', '\\"')
        try:
            value = json.loads(f'"{inner}"')
        except json.JSONDecodeError as error:
            self._fail(error.msg.lower())
        self._at = match.end()
        return str(value)

    def _bare(self) -> Any:
        """A number, a word, or unquoted text up to the comma or the end of the line."""
        match = _BARE_VALUE.match(self._text, self._at)
        raw = match.group() if match else ""
        token = _TRAILING_COMMENT.sub("", raw).rstrip()
        if not token:
            self._fail(f"expected a value, found {self._rest()!r}")
        if re.search(r"[\"{\[]|:(?:\s|$)", token):
            self._fail(f"{token!r} is not a value: quote it, or put a comma or a line break between two entries")
        self._at += len(token)
        if token in _WORDS:
            return _WORDS[token]
        if _NUMBER.match(token):
            return int(token) if re.fullmatch(r"[+-]?\d+", token) else float(token)
        return token

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        if match:
            self._at = match.end()
        if self._text.startswith("/*", self._at):
            self._fail("a comment /* is not closed")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _rest(self) -> str:
        return self._text[self._at : self._at + 30].split("\n")[0]

    def _line(self, position: int) -> int:
        return self._text.count("\n", 0, position) + 1

    def _fail(self, message: str, position: int | None = None) -> NoReturn:
        position = self._at if position is None else position
        column = position - (self._text.rfind("\n", 0, position) + 1) + 1
        raise ConfigError(f"{self._origin}: line {self._line(position)}, column {column}: {message}")
