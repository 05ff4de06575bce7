"""Covering arrays: few rows in which all combinations of the levels of any few factors occur, by a deterministic greedy search.

The search is that of AETG (Cohen, Dalal, Fredman and Patton, 1997): each row begins with the first combination that is still missing,
every other factor, in some order, gets the level that adds most, and of several such rows the best one is taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

_CANDIDATES = 12  # rows that are tried for each that is taken

Row = dict[str, Any]
Part = tuple[tuple[str, Any], ...]
"""Some factors with a level each, in the order of the factors."""


@dataclass(frozen=True)
class Rule:
    """What cannot be together. `broken` is asked with the levels of `factors`, in that order."""

    name: str
    factors: tuple[str, ...]
    broken: Callable[..., bool]

    def breaks(self, row: Mapping[str, Any]) -> bool:
        """Whether `row` breaks the rule; a row that does not have all of its factors yet does not."""
        return all(f in row for f in self.factors) and self.broken(*(row[f] for f in self.factors))


class Cover:
    """The combinations of `strength` factors, and rows that hold all of them that some legal row can hold."""

    def __init__(self, factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule] = (), strength: int = 2) -> None:
        if not 1 <= strength <= len(factors):
            raise ValueError(f"strength {strength} is not between 1 and the number of factors, {len(factors)}")
        self.factors = {name: tuple(levels) for name, levels in factors.items()}
        self.rules, self.strength = tuple(rules), strength
        self._of = {name: tuple(r for r in self.rules if name in r.factors) for name in factors}

    def parts(self) -> Iterator[Part]:
        """All combinations, legal or not."""
        for names in combinations(self.factors, self.strength):
            for levels in product(*(self.factors[n] for n in names)):
                yield tuple(zip(names, levels, strict=True))

    def within(self, row: Mapping[str, Any]) -> Iterator[Part]:
        """The combinations that a complete row holds."""
        return combinations(((n, row[n]) for n in self.factors), self.strength)

    def rows(self, given: Sequence[Row] = ()) -> tuple[list[Row], list[Part]]:
        """(rows to add to `given` so that every combination is held, combinations that no legal row can hold)."""
        held = {part for row in given for part in self.within(row)}
        missing = dict.fromkeys(part for part in self.parts() if part not in held)
        made: list[Row] = []
        impossible: list[Part] = []
        order = random.Random(0)
        while missing:
            part = next(iter(missing))
            if self.complete(dict(part), missing, order) is None:
                impossible.append(part)
                del missing[part]
                continue
            tried = [self.complete(dict(part), missing, order) for _ in range(_CANDIDATES)]
            row = max((r for r in tried if r is not None), key=lambda r: sum(p in missing for p in self.within(r)))
            made.append(row)
            for each in self.within(row):
                missing.pop(each, None)
        return made, impossible

    def complete(self, row: Row, missing: Mapping[Part, Any], order: random.Random) -> Row | None:
        """A legal row that has the levels of `row` and, as far as a greedy choice finds them, many of the `missing` combinations;
        None if there is none."""
        if any(rule.breaks(row) for rule in self.rules):
            return None
        left = [n for n in self.factors if n not in row]
        if not left:
            return {n: row[n] for n in self.factors}
        # a factor that rules connect with those that are chosen first: what they leave is seen early
        name = max(left, key=lambda n: (sum(any(f in row for f in r.factors) for r in self._of[n]), order.random()))
        gains = {level: (-self._gain(row, name, level, missing), order.random()) for level in self.factors[name]}
        for level in sorted(gains, key=lambda each: gains[each]):
            found = self.complete({**row, name: level}, missing, order)
            if found is not None:
                return found
        return None

    def _gain(self, row: Row, name: str, level: Any, missing: Mapping[Part, Any]) -> int:
        """Missing combinations that `name` = `level` completes together with what `row` has."""
        there = {**row, name: level}
        others = [n for n in self.factors if n in row]
        gain = 0
        for names in combinations(others, self.strength - 1):
            chosen = {*names, name}
            gain += tuple((n, there[n]) for n in self.factors if n in chosen) in missing
        return gain
