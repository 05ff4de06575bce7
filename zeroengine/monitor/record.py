"""What a rank leaves in a run's folder, and how it is read again.

`run.json` has the facts of the run (rank 0). `rank-00000.jsonl` has one object a line, each with a "kind": "start" (what is
predicted), "step" (times, loss, experts, and what was sent where that differs from the step before), "rest" (bytes by kind between
steps), "timeline" (spans and memory of one step). A file that a crash cut short is read as far as it goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroengine.errors import ConfigError

RUN_FILE = "run.json"
_RANK_FILE = "rank-{:05d}.jsonl"


def rank_file(folder: Path, rank: int) -> Path:
    return folder / _RANK_FILE.format(rank)


@dataclass
class Moved:
    """Bytes that a rank sent and operations that it issued, of one kind on one stream."""

    sent: int = 0
    calls: int = 0


@dataclass
class RankRecord:
    """Everything that is known of one rank. Seconds and bytes."""

    rank: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] | None = None

    @staticmethod
    def of(lines: Iterable[dict[str, Any]]) -> RankRecord:
        record = RankRecord()
        sent: list[Any] = []
        for line in lines:
            kind = line.get("kind")
            if kind == "start":  # also one that goes on from a checkpoint: what came after that is run again
                record.start, record.rank = line, int(line["rank"])
                record.steps = [step for step in record.steps if step["number"] <= line["number"]]
                sent = []
            elif kind == "rest":
                record.rest = line
            elif kind == "timeline":
                record.timeline = line
            elif kind == "step":
                sent = line.setdefault("moved", sent)
                record.steps.append(line)
        return record

    @property
    def moved(self) -> dict[tuple[str, str], Moved]:
        """By stream and kind of operation, over all steps."""
        found: dict[tuple[str, str], Moved] = {}
        for step in self.steps:
            for stream, operation, nbytes, calls in step["moved"]:
                total = found.setdefault((stream, operation), Moved())
                total.sent += nbytes
                total.calls += calls
        return found

    def lines(self) -> Iterator[dict[str, Any]]:
        """The objects that this was made of, for another process."""
        yield self.start
        yield self.rest
        yield from self.steps
        if self.timeline is not None:
            yield self.timeline


def read_lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with path.open() as file:
        for text in file:
            try:
                found.append(json.loads(text))
            except ValueError:
                break  # the process ended while it wrote
    return found


def read_plan(path: str | None) -> dict[str, dict[str, float]]:
    """What the file of `monitor.plan` predicts: `time` and `memory`. Raises `ConfigError` for anything else in it."""
    if path is None:
        return {}
    try:
        plan = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"monitor.plan: {path} cannot be read ({error}); give a file of JSON, or remove the key") from error
    parts = {name: plan.get(name, {}) for name in ("time", "memory")} if isinstance(plan, dict) else {}
    numbers = [n for part in parts.values() for n in (part.values() if isinstance(part, dict) else [None])]
    if not parts or not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        raise ConfigError(f"monitor.plan: {path} has no objects `time` and `memory` of numbers, as in " + '{"time": {"compute": 0.5}}')
    return parts


def read_run(folder: Path) -> tuple[dict[str, Any], list[RankRecord]]:
    """The run's facts and the records of its ranks. Raises `ConfigError` for a folder without a run."""
    files = sorted(folder.glob(_RANK_FILE.replace("{:05d}", "*")))
    if not (folder / RUN_FILE).is_file() or not files:
        raise ConfigError(
            f"{folder} has no records of a run ({RUN_FILE}, {_RANK_FILE.format(0)}); give the folder that `monitor.run_dir` named in "
            "the configuration of the run"
        )
    records = [RankRecord.of(read_lines(path)) for path in files]
    run = json.loads((folder / RUN_FILE).read_text())
    return run, [r for r in records if r.start and r.rank < run["world"]]
