"""Drawings in SVG: lines, bands, bars and their axes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

_WIDTH, _LEFT, _RIGHT, _BOTTOM = 920.0, 76.0, 14.0, 22.0


class Shows(Protocol):
    def show(self, path: str, how: str = "text", tag: str = "span", more: str = "") -> str:
        """The value at a path of the document as an element that carries the path."""
        ...


class Drawing:
    """`height` in units of which the width has 920. Axes run over their ticks, which lie in the document; None: no such axis."""

    def __init__(self, name: str, read: Shows, height: float, x_ticks: Sequence[float] | None, y_ticks: Sequence[float] | None) -> None:
        self._read, self._height = read, height
        self._x, self._y = x_ticks, y_ticks
        self._parts = [f'<svg id="plot-{name}" viewBox="0 0 {_WIDTH:g} {height:g}" role="img">']
        self.top = 6.0

    def axes(self, x_path: str | None, x_as: str, y_path: str | None = None, y_as: str = "") -> None:
        bottom = self._height - _BOTTOM
        for i, value in enumerate(self._y or ()):
            y = self._at_y(value)
            self._parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ec"/>')
            place = f' x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end"'
            self._parts.append(self._read.show(f"{y_path}.{i}", y_as, "text", place))
        for i, value in enumerate(self._x or ()):
            x = self._at_x(value)
            self._parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom}" stroke="#eef0f4"/>')
            place = f' x="{x:.1f}" y="{self._height - 6:g}" text-anchor="{"end" if i + 1 == len(self._x or ()) else "middle"}"'
            self._parts.append(self._read.show(f"{x_path}.{i}", x_as, "text", place))

    def line(self, x: Sequence[float], y: Sequence[float], colour: str) -> None:
        points = [f"{self._at_x(a):.1f},{self._at_y(b):.1f}" for a, b in zip(x, y, strict=True)]
        if len(points) == 1:
            cx, cy = points[0].split(",")
            self._parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"/>')
        self._parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def band(self, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> None:
        """The area between two lines; a value holds until the next one."""
        upper, lower = self._stairs(x, high), self._stairs(x, low)
        self._parts.append(f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{colour}" fill-opacity="0.85"/>')

    def bar(self, start: float, end: float, top: float, height: float, colour: str, told: str | None = None) -> None:
        """Along the x axis. `told`: path of what is said of it under the pointer."""
        x = self._at_x(start)
        width = max(self._at_x(end) - x, 0.4)
        shape = f'<rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}" fill="{colour}"'
        self._parts.append(f"{shape}/>" if told is None else f"{shape}>{self._read.show(told, 'text', 'title')}</rect>")

    def columns(self, values: Sequence[float], colour: str) -> None:
        """One for each value, from the bottom."""
        room = (_WIDTH - _LEFT - _RIGHT) / len(values)
        base = self._at_y(0.0)
        for i, value in enumerate(values):
            y = self._at_y(value)
            x = _LEFT + room * (i + 0.1)
            shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{room * 0.8:.1f}" height="{max(base - y, 0.0):.1f}"'
            self._parts.append(f'{shape} fill="{colour}"/>')

    def label(self, y: float, words: str, path: str) -> None:
        """At the left: words, and a value of the document."""
        shown = self._read.show(path, "number", "tspan")
        self._parts.append(f'<text x="{_LEFT - 8}" y="{y:g}" text-anchor="end">{escape(words)}{shown}</text>')

    def text(self) -> str:
        return "".join([*self._parts, "</svg>"])

    def _stairs(self, x: Sequence[float], y: Sequence[float]) -> list[str]:
        points = []
        for i, value in enumerate(y):
            points.append(f"{self._at_x(x[i]):.1f},{self._at_y(value):.1f}")
            if i + 1 < len(x):
                points.append(f"{self._at_x(x[i + 1]):.1f},{self._at_y(value):.1f}")
        return points

    def _at_x(self, value: float) -> float:
        low, high = _ends(self._x)
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def _at_y(self, value: float) -> float:
        low, high = _ends(self._y)
        bottom = self._height - _BOTTOM
        return bottom - (value - low) / (high - low) * (bottom - self.top)


def _ends(ticks: Sequence[float] | None) -> tuple[float, float]:
    if not ticks:
        return 0.0, 1.0
    return ticks[0], ticks[-1]
