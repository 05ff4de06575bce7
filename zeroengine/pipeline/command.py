"""`zerorun schedule`: shows what a schedule does."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroengine.arguments import Parser, positive
from zeroengine.errors import ConfigError
from zeroengine.pipeline.checks import check
from zeroengine.pipeline.draw import as_text, write_picture, write_trace
from zeroengine.pipeline.schedules import SCHEDULES, find_rule
from zeroengine.pipeline.simulate import Costs, simulate


def build_parser() -> Parser:
    parser = Parser(prog="zerorun schedule", description="Checks, simulates and draws a pipeline schedule.")
    add = parser.add_argument
    add("--name", default="1f1b", help=f"{', '.join(SCHEDULES)}, or package.module:function (default %(default)s)")
    add("--stages", type=int, default=4, help="pipeline ranks (default %(default)s)")
    add("--micro-batches", type=int, default=8, help="micro-batches of a step (default %(default)s)")
    add("--virtual", type=int, default=None, help="stages a rank (default: what the schedule needs)")
    add("--forward", type=_time, default=1.0, help="time of a forward (default %(default)s)")
    add("--input", type=_time, default=1.0, help="time of an input gradient (default %(default)s)")
    add("--weight", type=_time, default=1.0, help="time of a weight gradient (default %(default)s)")
    add("--message", type=_time, default=0.0, help="time of a message between ranks (default %(default)s)")
    add("--width", type=positive, default=150, help="columns of the text (default %(default)s)")
    add("--actions", action="store_true", help="list every action, sends and receives included")
    add("--output", type=Path, action="append", default=[], help="write a .json trace or a .png/.svg picture; repeatable")
    return parser


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: a finite number, 0 or more")
    return value


def run(argv: Sequence[str]) -> int:
    """The exit code. Raises `ScheduleError` for numbers that the schedule can not be made for, `ConfigError` for a wrong command line
    and for what cannot be drawn or written."""
    args = build_parser().parse_args(argv)
    if ":" in args.name and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as in a script there
    rule = find_rule(args.name)
    checked = check(rule.build(args.stages, args.micro_batches, args.virtual))
    schedule = checked.schedule
    timeline = simulate(schedule, Costs(args.forward, args.input, args.weight, message=args.message))
    each = schedule.stages // schedule.size
    write = sys.stdout.write
    write(f"{rule.name}: {schedule.size} ranks, {each} stage{'s' * (each > 1)} a rank, {schedule.micro_batches} micro-batches\n")
    write(as_text(timeline, args.width) + "\n")
    write(f"time {timeline.duration:g}, idle {timeline.bubble:.2%}\n")
    write(f"activations held at most, by rank: {', '.join(map(str, checked.peak_live))}\n")
    if args.actions:
        for rank, actions in enumerate(schedule.ranks):
            write(f"rank {rank}: {' '.join(map(str, actions))}\n")
    for path in args.output:
        try:
            if path.suffix == ".json":
                write_trace(path, [(rule.name, timeline)], second=1000.0)
            else:
                write_picture(path, [(rule.name, timeline)])
        except OSError as error:
            raise ConfigError(f"--output {path}: {error.strerror or error}") from error
        write(f"wrote {path}\n")
    return 0
