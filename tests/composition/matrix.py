"""`python -m tests.composition.matrix` runs every combination, and all that is refused, and writes docs/composition.md."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from itertools import combinations
from pathlib import Path

import torch
import transformers

from tests.composition import compare, models, space
from tests.composition.cover import Cover, Row
from tests.composition.refusals import CASES, refuse
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "composition.md"
EACH = 15
"""Combinations of one launch: what ends one does not end many."""
RANKS = (2, 4, 8)
LEVELS = [(factor, level) for factor, levels in space.FACTORS.items() for level in levels]


class Results:
    """What was found so far, by label of a combination and by what is refused; kept in a file, if there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        known = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.wrong: dict[str, str] = known.get("wrong", {})
        self.refused: dict[str, str] = known.get("refused", {})
        self.seconds: float = known.get("seconds", 0.0)

    def keep(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps({"wrong": self.wrong, "refused": self.refused, "seconds": self.seconds}, indent=1))


def run(designs: list[tuple[Row, ...]], results: Results, limit: float) -> bool:
    """Fills `results`, in which "" stands where nothing is wrong; False if `limit` seconds ended it before all was run."""
    ends = time.monotonic() + limit
    if results.refused.keys() != CASES.keys():
        results.refused = run_refused()
        results.keep()
    with tempfile.TemporaryDirectory() as folder:
        return all(_launches([row for row in rows if row["ranks"] == n], folder, results, ends) for rows in designs for n in RANKS)


def _launches(rows: list[Row], folder: str, results: Results, ends: float) -> bool:
    """`run` for rows of one number of ranks."""
    while left := [row for row in rows if space.label(row) not in results.wrong]:
        before = time.monotonic()
        if before > ends:
            return False
        now = left[:EACH]
        outcomes = compare.launch(now, folder)
        found = {space.label(row): compare.judge(row, outcomes[space.label(row)]) for row in now}
        if not any(found.values()):
            found[space.label(now[-1])] = compare.left_behind(now, outcomes)
        results.wrong |= found
        results.seconds += time.monotonic() - before
        results.keep()
        bad = sum(map(bool, results.wrong.values()))
        sys.stdout.write(f"{left[0]['ranks']} processes: {max(len(left) - EACH, 0)} left, wrong {bad}\n")
        sys.stdout.flush()
    return True


def run_refused() -> dict[str, str]:
    """What rank 0 was told, by case."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in CASES.values()}):
            names = [name for name, case in CASES.items() if case.ranks == ranks]
            told = run_ranks(refuse, ranks, names, folder, timeout=200)[0]
            found |= {name: refused.text for name, refused in zip(names, told, strict=True)}
    return {name: found[name] for name in CASES}


def matrix(rows: list[Row]) -> str:
    """How many combinations hold each pair of levels; `-` what is refused."""
    counts: Counter[frozenset[tuple[str, object]]] = Counter()
    for row in rows:
        counts.update(map(frozenset, combinations([(f, row[f]) for f in space.FACTORS], 2)))
    shown = [*((("ranks", 8),) if any(r["ranks"] == 8 for r in rows) else ()), *LEVELS]
    shown.sort(key=lambda each: list(space.FACTORS).index(each[0]))
    names = [f"{factor} {level}" for factor, level in shown]
    width = max(map(len, names))
    lines = [" " * (width + 4) + "".join(f"{i + 1:>4}" for i in range(len(shown)))]
    for i, (a, name) in enumerate(zip(shown, names, strict=True)):
        cells = []
        for b in shown[: i + 1]:
            number = counts[frozenset((a, b))]
            cells.append("   ." if a[0] == b[0] else f"{number:>4}" if number else "   -")
        lines.append(f"{i + 1:>3} {name:<{width}}" + "".join(cells))
    return "\n".join(lines)


def reasons() -> list[str]:
    """Which rules forbid pairs, and the pairs that only 8 processes hold."""
    by_rule: dict[str, list[str]] = {}
    for part in space.pairs()[1]:
        told = " with ".join(f"{f} {v}" for f, v in part)
        broken = [rule.name for rule in space.RULES if rule.breaks(dict(part))]
        by_rule.setdefault(broken[0] if broken else "more than 4 processes are needed", []).append(told)
    return [f"- {rule}: {'; '.join(pairs)}" for rule, pairs in by_rule.items()]


def held(rows: list[Row]) -> list[str]:
    """A table: of the pairs and triples that some row can hold, how many `rows` hold."""
    lines = ["| | pairs of levels | triples of levels |", "|---|---|---|"]
    found: list[list[str]] = [[], []]
    for strength in (2, 3):
        cover = Cover(space.FACTORS, space.RULES, strength)
        there = {part for row in rows for part in cover.within(row)}
        for line, possible in zip(found, space.possible(strength), strict=True):
            line.append(f"{len(possible & there):,} of {len(possible):,}")
    names = ("that 2 or 4 processes can hold", "that take 8 processes")
    return [*lines, *(f"| {name} | {' | '.join(line)} |" for name, line in zip(names, found, strict=True))]


def page(designed: list[Row], results: Results) -> str:
    """Of what was run; `designed` is all that would be."""
    wrong, refused, seconds = results.wrong, results.refused, results.seconds
    rows = [row for row in designed if space.label(row) in wrong]
    ranks = Counter(row["ranks"] for row in rows)
    failed = [f"- {space.label(row)}: {text.splitlines()[-1]}" for row in rows if (text := wrong[space.label(row)])]
    table = ["| | |", "|---|---|", *(f"| {space.TITLES[f]} | {', '.join(map(str, levels))} |" for f, levels in space.FACTORS.items())]
    bounds = [f"| {d} | {compare.LOSSES[d]:g} | {compare.NORMS[d]:g} | {compare.WEIGHTS[d]:g} |" for d in models.DTYPES]
    told = [f"| {name} | {text.splitlines()[0].replace('|', '/')} |" for name, text in refused.items()]
    missing = len(designed) - len(rows)
    return "\n".join([
        "# What composes",
        "",
        f"A small GPT-2 (tied embedding of 61 rows) and a small Mixtral (four experts, of which one gets no token; `moe aux`: with the "
        f"loss of its routers) train for {models.STEPS} steps on the same data under combinations of",
        "",
        *table,
        "",
        "`tp` 2+sp: `tensor_parallel.sequence_parallel`. Pipelines have two ranks; `interleaved`, `zb-v` and `dualpipe-v` two stages "
        "on each. In fp16 the last rank's gradient is infinite in one step, which all ranks must skip. Every combination is compared "
        "with one process and plain torch: losses, norms before clipping, loss scale and skipped steps on every rank, final weights; "
        "loads of the experts with the number of tokens; the planned with the measured memory. Largest relative differences that pass:",
        "",
        "| type | losses | norms | weights (of their change) |",
        "|---|---|---|---|",
        *bounds,
        "",
        "The runs are on CPUs: state that is offloaded to `cpu` is there already, that on `nvme` goes to files. `offload_param` has an "
        "effect at stage 3 only.",
        "",
        f"Run: {len(rows)} combinations ({', '.join(f'{n} on {r} processes' for r, n in sorted(ranks.items()))}); "
        f"{len(rows) - len(failed)} agree with one process, {len(failed)} do not. {len(refused)} more are refused. "
        + (f"Not run: {missing} of the {len(designed)} that hold every triple. " if missing else "")
        + f"torch {torch.__version__}, transformers {transformers.__version__}, {seconds / 60:.0f} minutes on 2 cores. Many engines "
        "live one after another in each process; threads, process groups, file descriptors and files are counted and do not grow.",
        "",
        *held(rows),
        "",
        *(["Wrong:", "", *failed, ""] if failed else []),
        "How many combinations hold each pair (`-`: none, see below; a column has the number of its row):",
        "",
        "```",
        matrix(rows),
        "```",
        "",
        "Pairs that 2 and 4 processes do not hold:",
        "",
        *reasons(),
        "",
        "## What is refused",
        "",
        "On all ranks, by `initialize`, before the model is changed; it can be given again.",
        "",
        "| | |",
        "|---|---|",
        *told,
        "",
        "## Run it again",
        "",
        "    pytest tests/composition                     # every pair",
        "    ZE_COMPOSE=all pytest tests/composition      # every triple, and 8 processes",
        "    python -m tests.composition.matrix           # the same, and this page (--pairs: pairs only; --limit: in parts)",
        "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", action="store_true", help="only the rows of the default test run")
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, help="JSON file of what is known, to which is added; combinations in it are not run again")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no more is started (to go on later)")
    arguments = parser.parse_args()
    designs = space.designs(not arguments.pairs)
    results = Results(arguments.results)
    complete = run(designs, results, arguments.limit)
    arguments.output.write_text(page([row for rows in designs for row in rows], results))
    for label, text in results.wrong.items():
        if text:
            sys.stdout.write(f"{label}: {text}\n")
    return 2 if not complete else int(any(results.wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
