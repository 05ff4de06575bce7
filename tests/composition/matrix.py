"""`python -m tests.composition.matrix` runs every combination, and all that is refused, and writes docs/composition.md."""

from __future__ import annotations

import argparse
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
from tests.composition.refusals import CASES, Refused, refuse
from tests.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "composition.md"
EACH = 40
LEVELS = [(factor, level) for factor, levels in space.FACTORS.items() for level in levels]


def run(rows: list[Row]) -> dict[str, str]:
    """What is wrong with each combination, by label; empty where nothing is."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({row["ranks"] for row in rows}):
            mine = [row for row in rows if row["ranks"] == ranks]
            for i in range(0, len(mine), EACH):
                outcomes = compare.launch(mine[i : i + EACH], folder)
                found |= {space.label(row): compare.judge(row, outcomes[space.label(row)]) for row in mine[i : i + EACH]}
                sys.stdout.write(f"{ranks} processes: {min(i + EACH, len(mine))} of {len(mine)}, wrong {sum(map(bool, found.values()))}\n")
                sys.stdout.flush()
    return found


def run_refused() -> dict[str, Refused]:
    """What rank 0 was told, by case."""
    found: dict[str, Refused] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in CASES.values()}):
            names = [name for name, case in CASES.items() if case.ranks == ranks]
            found |= dict(zip(names, run_ranks(refuse, ranks, names, folder, timeout=200)[0], strict=True))
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


def page(rows: list[Row], wrong: dict[str, str], refused: dict[str, Refused], seconds: float, everything: bool) -> str:
    cover = Cover(space.FACTORS, space.RULES)
    legal = len(list(cover.parts())) - len(space.pairs()[1])
    ranks = Counter(row["ranks"] for row in rows)
    failed = [f"- {label}: {text.splitlines()[-1]}" for label, text in wrong.items() if text]
    table = ["| | |", "|---|---|", *(f"| {space.TITLES[f]} | {', '.join(map(str, levels))} |" for f, levels in space.FACTORS.items())]
    bounds = [f"| {d} | {compare.LOSSES[d]:g} | {compare.NORMS[d]:g} | {compare.WEIGHTS[d]:g} |" for d in models.DTYPES]
    told = [f"| {name} | {r.text.splitlines()[0].replace('|', '/')} |" for name, r in refused.items()]
    held = "every pair and every triple of levels" if everything else "every pair of levels"
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
        f"Run: {len(rows)} combinations ({', '.join(f'{n} on {r} processes' for r, n in sorted(ranks.items()))}), which hold {held} "
        f"that some combination may have ({legal:,} pairs on 2 and 4 processes); {len(rows) - len(failed)} agree with one process. "
        f"{len(refused)} more are refused. torch {torch.__version__}, transformers {transformers.__version__}, {seconds / 60:.0f} minutes "
        "on 2 cores. Many engines live one after another in each process; threads, process groups, file descriptors and files are "
        "counted and do not grow.",
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
        "    python -m tests.composition.matrix           # the same, and this page (--pairs: pairs only)",
        "",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", action="store_true", help="only the rows of the default test run")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    started = time.monotonic()
    rows = [*space.pairs()[0], *(() if arguments.pairs else (*space.triples()[0], *space.eight()[0]))]
    wrong = run(rows)
    refused = run_refused()
    arguments.output.write_text(page(rows, wrong, refused, time.monotonic() - started, not arguments.pairs))
    for label, text in wrong.items():
        if text:
            sys.stdout.write(f"{label}: {text}\n")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
