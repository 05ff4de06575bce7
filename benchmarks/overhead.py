"""`python -m benchmarks.overhead`: does the host's work of one rank grow with the world?

Rank 0 of a small and of a large world, simulated by torch's fake process group, train a model of many small layers in
turns. Reported: start-up (process group and `initialize`) and host time a step, and the ratio of large to small.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    WorkerGroup,
    idle_warning,
    machine,
    number,
    paired_ratio,
    rotated,
    say,
    table,
    write,
    write_json,
)
from zeroengine.arguments import positive

_DESCRIPTION = "Host time of zeroengine in a large simulated world against a small one."
_STAGES = (0, 1, 2, 3)
_PLAIN = "plain torch"


@dataclass
class Times:
    """Seconds of one job: `startup` one a process, `step` the median of each round."""

    startup: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    finite: bool = True


@dataclass(frozen=True)
class Key:
    """A job: a stage in a world; no stage is the plain torch loop, which has no world."""

    stage: int | None
    world: int

    @property
    def name(self) -> str:
        return _PLAIN if self.stage is None else f"zeroengine-{self.stage} of {self.world}"


def _stages(text: str) -> list[int]:
    stages = sorted({int(part) for part in text.split(",")})
    if not stages or not set(stages) <= set(_STAGES):
        raise argparse.ArgumentTypeError(f"stages {text!r}; they are a comma-separated choice of 0, 1, 2, 3")
    return stages


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description=_DESCRIPTION)
    add = parser.add_argument
    add("--stages", type=_stages, default=list(_STAGES), help="ZeRO stages, comma-separated (default: all)")
    add("--small", type=positive, default=2, help="ranks of the small world (default %(default)s)")
    add("--large", type=positive, default=1024, help="ranks of the large world (default %(default)s)")
    add("--layers", type=positive, default=100, help="layers of the model (default %(default)s)")
    add("--width", type=positive, default=32, help="width of a layer (default %(default)s)")
    add("--startups", type=positive, default=5, help="fresh processes of each kind (default %(default)s)")
    add("--rounds", type=positive, default=20, help="turns of each kind (default %(default)s)")
    add("--steps", type=positive, default=10, help="training steps of a turn (default %(default)s)")
    add("--warmup", type=positive, default=5, help="steps before the first turn, not counted (default %(default)s)")
    add("--timeout", type=float, default=300.0, help="seconds in which a process must start, or finish a turn")
    add("--json", type=Path, help="write all figures here")
    return parser


class _Overhead:
    """Start-up over fresh processes, then steps in turns over the last of them."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.keys = [Key(stage, world) for stage in args.stages for world in (args.small, args.large)]
        self.times = {key: Times() for key in [*self.keys, Key(None, 1)]}

    def run(self) -> dict[Key, Times]:
        for turn in range(self.args.startups - 1):
            for key in rotated(self.keys, turn):
                with self._start(key):
                    pass
            say(f"start-up: round {turn + 1} of {self.args.startups}")
        with ExitStack() as stack:
            groups = {key: stack.enter_context(self._start(key)) for key in self.times}
            for group in groups.values():
                group.ask({"steps": self.args.warmup})
            for turn in range(self.args.rounds):
                for key in rotated(list(groups), turn):
                    (answer,) = groups[key].ask({"steps": self.args.steps})
                    self.times[key].step.append(statistics.median(answer["seconds"]))
                    self.times[key].finite &= answer["finite"]
            say(f"steps: {self.args.rounds} rounds")
        return self.times

    def _start(self, key: Key) -> WorkerGroup:
        arguments = {"stage": key.stage, "world": key.world, "layers": self.args.layers, "width": self.args.width}
        group = WorkerGroup(
            key.name, "benchmarks.simulated:SimulatedJob", arguments,
            python=sys.executable, world=1, threads=1, timeout=self.args.timeout,
        )  # fmt: skip
        self.times[key].startup.append(group.facts[0]["startup_seconds"])
        return group


def summarize(times: dict[Key, Times], stages: Sequence[int], small: int, large: int) -> dict[str, dict[str, Any]]:
    """By stage: medians in seconds, and the ratio large to small of start-up and step, round by round."""
    plain = times[Key(None, 1)]
    result: dict[str, dict[str, Any]] = {}
    for stage in stages:
        few, many = times[Key(stage, small)], times[Key(stage, large)]
        result[str(stage)] = {
            "startup_small": statistics.median(few.startup),
            "startup_large": statistics.median(many.startup),
            "startup_ratio": paired_ratio(many.startup, few.startup),
            "step_small": statistics.median(few.step),
            "step_large": statistics.median(many.step),
            "step_ratio": paired_ratio(many.step, few.step),
            "step_over_plain": paired_ratio(few.step, plain.step),
            "finite": few.finite and many.finite,
            "raw": {"small": vars(few), "large": vars(many)},
        }
    return result


def render(summary: dict[str, dict[str, Any]], small: int, large: int) -> str:
    header = [
        "stage", f"start-up ms: {small} ranks", f"{large} ranks", "ratio",
        f"step ms: {small} ranks", f"{large} ranks", "ratio", "÷ plain torch",
    ]  # fmt: skip
    rows = []
    for stage, s in summary.items():
        rows.append([
            stage, number(s["startup_small"] * 1e3, ".1f"), number(s["startup_large"] * 1e3, ".1f"),
            number(s["startup_ratio"]["median"], ".2f"), number(s["step_small"] * 1e3, ".2f"),
            number(s["step_large"] * 1e3, ".2f"), number(s["step_ratio"]["median"], ".2f"),
            number(s["step_over_plain"]["median"], ".2f"),
        ])  # fmt: skip
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    facts = machine()
    warning = idle_warning(facts)
    if warning:
        write(warning)
    summary = summarize(_Overhead(args).run(), args.stages, args.small, args.large)
    write(render(summary, args.small, args.large))
    odd = [stage for stage, s in summary.items() if not s["finite"]]
    if odd:
        write(f"losses of stages {', '.join(odd)} were not finite: steps may have been skipped, so distrust their times")
    if args.json:
        chosen = {name: value for name, value in vars(args).items() if name != "json"}
        write_json(args.json, {"settings": chosen, "machine": facts, "stages": summary})
    return 0


if __name__ == "__main__":
    sys.exit(main())
