"""Checks that a page says what its document says, by its own reading of both."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br", "line", "rect", "circle", "polyline", "polygon"}
_UNITS = {
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "K": 1e3, "M": 1e6, "G": 1e9, "": 1.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6,
    "%": 0.01, "x": 1.0,
}  # fmt: skip


class Page(HTMLParser):
    """Texts with the innermost `data-json` around them, the shapes of each drawing, the document inside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[tuple[str | None, str, str]] = []  # path, how, text
        self.shapes: dict[str, dict[str, int]] = {}
        self.document: Any = None
        self.scripts: list[dict[str, str | None]] = []
        self.fetched: list[str] = []
        self._stack: list[tuple[str, str | None, str]] = []
        self._plot: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "data", "xlink:href") and v]
        if tag == "script":
            self.scripts.append(values)
        if tag == "svg":
            self._plot = (values.get("id") or "").removeprefix("plot-").split("-")[0]
        if self._plot is not None:
            counts = self.shapes.setdefault(self._plot, {})
            counts[tag] = counts.get(tag, 0) + 1
        if tag not in _VOID or (tag == "rect" and "data-json" in values):
            self._stack.append((tag, values.get("data-json"), values.get("data-as") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._plot is not None:
            counts = self.shapes.setdefault(self._plot, {})
            counts[tag] = counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "svg":
            self._plot = None
        while self._stack and self._stack[-1][0] != tag and tag not in _VOID:
            self._stack.pop()
        if self._stack and self._stack[-1][0] == tag:
            self._stack.pop()

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _, _ in self._stack]
        if "style" in tags or not data.strip():
            return
        if "script" in tags:
            self.document = json.loads(data)
            return
        path, how = next(((p, h) for _, p, h in reversed(self._stack) if p), (None, ""))
        self.texts.append((path, how, data))


def value_at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def faults(page: str, document: Any) -> list[str]:
    """Numbers without a path, and those that differ from the document by more than their last digit."""
    read, found = Page(page), []
    if read.document != document:
        found.append("the document inside the page is another")
    if read.fetched or any(s.get("type") != "application/json" for s in read.scripts):
        found.append(f"the page needs something: {read.fetched} {read.scripts}")
    for path, how, text in read.texts:
        if path is None:
            if re.search(r"\d", text):
                found.append(f"a number without a path: {text!r}")
            continue
        value = value_at(document, path)
        if how == "text":
            if text != str(value):
                found.append(f"{path}: {text!r} is not {value!r}")
            continue
        match = re.fullmatch(r"(-?[\d.]+(?:e[+-]?\d+)?)\s*(\S*)", text)
        if match is None or match[2] not in _UNITS:
            found.append(f"{path}: {text!r} is no number")
        elif abs(float(match[1]) * _UNITS[match[2]] - value) > 6e-4 * max(abs(value), 1e-12) + (6e-4 if how == "share" else 0) + (
            6e-3 * abs(value) if how == "factor" else 0
        ):
            found.append(f"{path}: {text!r} is not {value!r}")
    if len(read.texts) < 20:
        found.append("the page is empty")
    return found
