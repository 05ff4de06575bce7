"""What a rank leaves in a run's folder, and how it is read again.

`run.json` has the facts of the run (rank 0). `rank-00000.jsonl` has one object a line, each with a "kind": "start" (what is
predicted), "step" (times, loss, experts, and what was sent where that differs from the step before), "rest" (bytes by kind between
steps), "timeline" (spans and memory of one step), "kept" (the most bytes of activations in one step). A file that a crash cut short is
read as far as it goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    kept: dict[str, Any] | None = None

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
            elif kind == "kept":
                record.kept = line
            elif kind == "step":
                sent = line.setdefault("moved", sent)
                record.steps.append(line)
        return record

    @property
    def moved(self) -> dict[tuple[str, str], Moved]:
        """By stream and kind of operation, over all steps."""
        return moved_in(self.steps)

    def lines(self) -> Iterator[dict[str, Any]]:
        """The objects that this was made of, for another process."""
        yield self.start
        yield self.rest
        yield from self.steps
        yield from (line for line in (self.timeline, self.kept) if line is not None)


def moved_in(steps: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Moved]:
    """By stream and kind of operation, over these steps."""
    found: dict[tuple[str, str], Moved] = {}
    for step in steps:
        for stream, operation, nbytes, calls in step["moved"]:
            total = found.setdefault((stream, operation), Moved())
            total.sent += nbytes
            total.calls += calls
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with path.open() as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                break  # the process ended while it wrote
            if isinstance(line, dict):
                found.append(line)
    return found


def read_plan(path: str | None, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the file of `monitor.plan`, or `monitor.predicted` itself (`given`), predicts: `time` and `memory`, `traffic` by pipeline rank,
    and `others`, layouts with less memory. Raises `ConfigError` for anything else in it."""
    if path is not None and given is not None:
        raise ConfigError("monitor.plan and monitor.predicted are two places for the predictions of one run; remove one of them")
    if path is None:
        return {} if given is None else _predictions(given, "monitor.predicted")
    try:
        plan = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"monitor.plan: {path} cannot be read ({error}); give a file of JSON, or remove the key") from error
    return _predictions(plan, f"monitor.plan: {path}")


def _predictions(plan: Any, where: str) -> dict[str, Any]:
    """Plain values of the parts that are read, checked."""
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{where} is no object with `time` and `memory`, as in " + '{"time": {"compute": 0.5}}')
    found: dict[str, Any] = {name: _numbers(plan.get(name, {}), f"{where}: {name}") for name in ("time", "memory")}
    traffic = plan.get("traffic", {})
    if not isinstance(traffic, Mapping) or not all(str(place).isdecimal() for place in traffic):
        raise ConfigError(f"{where}: traffic is no object of pipeline ranks, as in " + '{"0": {"tensor.all_reduce": 1024}}')
    found["traffic"] = {str(place): _numbers(sent, f"{where}: traffic.{place}") for place, sent in traffic.items()}
    others = plan.get("others", ())
    if not isinstance(others, Sequence) or not all(isinstance(o, Mapping) and isinstance(o.get("layout"), str) for o in others):
        raise ConfigError(f"{where}: others is no list of objects with a `layout`")
    sizes = ("memory", "seconds")
    found["others"] = [{"layout": o["layout"], **_numbers({k: o.get(k) for k in sizes}, f"{where}: others")} for o in others]
    return found


def _numbers(part: Any, where: str) -> dict[str, float]:
    values = part.values() if isinstance(part, Mapping) else [None]
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in values):
        raise ConfigError(f"{where} is no object of numbers")
    return dict(part)


def predicted_traffic(plan: Mapping[str, Any], place: int) -> Mapping[str, float]:
    """Bytes by "stream.operation" that a plan has for pipeline rank `place`. Of long pipelines it knows some ranks; one between them is
    as the last of those before it."""
    known = {int(at): sent for at, sent in plan.get("traffic", {}).items()}
    if place in known:
        return known[place]
    before = [at for at in known if at < place]
    return known[max(before)] if before else {}


def read_run(folder: Path) -> tuple[dict[str, Any], list[RankRecord]]:
    """The run's facts and the records of its ranks. Raises `ConfigError` for a folder without a run."""
    files = sorted(folder.glob(_RANK_FILE.replace("{:05d}", "*")))
    if not (folder / RUN_FILE).is_file() or not files:
        raise ConfigError(
            f"{folder} has no records of a run ({RUN_FILE}, {_RANK_FILE.format(0)}); give the folder that `monitor.run_dir` named in "
            "the configuration of the run"
        )
    try:
        run = json.loads((folder / RUN_FILE).read_text())
        world = int(run["world"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / RUN_FILE} is damaged ({type(error).__name__}: {error}); it is written when a run starts") from error
    records = [r for r in (RankRecord.of(read_lines(path)) for path in files) if r.start and r.rank < world]
    if not records:
        raise ConfigError(f"{folder}: no rank has written its first record; the run ended before its engine was made")
    return run, records
