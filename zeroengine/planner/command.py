"""`zerorun plan`: which layouts of a job fit, how long a step takes, and a configuration of the best."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroengine.arguments import Parser, positive, positive_numbers
from zeroengine.errors import ConfigError
from zeroengine.pipeline.actions import ScheduleError
from zeroengine.pipeline.schedules import find_rule
from zeroengine.planner.hardware import PRESETS, Hardware, find_hardware, parse_memory
from zeroengine.planner.layouts import Choices, Job, Layout
from zeroengine.planner.model import ModelSource, find_model
from zeroengine.planner.plan import Plan, Planner
from zeroengine.planner.predicted import with_predictions
from zeroengine.planner.search import Found, search
from zeroengine.planner.show import in_full, sent_by_dim, summary, table
from zeroengine.wording import size


def _stages(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words("0", "1", "2", "3")(text))


def _words(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Some of `known`, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(word.strip() for word in text.split(","))
        for word in found:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return found

    return parse


def _schedules(text: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(","))
    for name in names:
        try:
            find_rule(name)
        except ScheduleError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def build_parser() -> Parser:
    parser = Parser(
        prog="zerorun plan", description="Works out memory, traffic and time of every legal layout of a job.", allow_abbrev=False
    )
    job = parser.add_argument_group("the job")
    add = job.add_argument
    add("--model", help="folder with config.json, its path, a model type of transformers, or python:package.module:factory")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="attribute of the model's configuration; repeatable")
    add("--gpus", type=positive, default=8, help="ranks (default %(default)s)")
    add("--gpu-memory", default=None, metavar="SIZE", help="of one, as 80GB (default: what the hardware has)")
    add("--host-memory", default=None, metavar="SIZE", help="of a host, for offloading (default: not looked at)")
    add("--sequence", type=positive, default=None, help="tokens of a sequence (default: the model's longest, at most 4096)")
    add("--batch", type=positive, default=None, help="sequences of a step over all ranks (default: 4 for each rank)")
    add("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16", help="type of weights (default %(default)s)")
    add("--optimizer", default="AdamW", help="its name in the configuration (default %(default)s)")
    add("--config", default=None, metavar="FILE", help="configuration whose other keys the plan keeps")
    add("--hardware", default="a100-80g", help=f"{', '.join(PRESETS)}, or a file of --measure (default %(default)s)")
    add("--gpus-per-node", type=positive, default=None, help="default: what the hardware says")
    tried = parser.add_argument_group("what is tried (numbers separated by commas)")
    add = tried.add_argument
    for name in ("pp", "tp"):
        add(f"--{name}", type=positive_numbers, default=None, help="default: all divisors" + (" inside a node" if name == "tp" else ""))
    add("--cp", type=positive_numbers, default=(1,), help="default: 1")
    add("--ep", type=positive_numbers, default=(1,), help="default: 1")
    add("--dp-replicate", type=positive_numbers, default=(1,), help="default: 1")
    add("--stage", type=_stages, default=(0, 1, 2, 3), help="ZeRO stages (default: all)")
    add("--micro-batch", type=positive_numbers, default=(1, 2, 4, 8), help="default: 1,2,4,8")
    add("--recompute", type=_words("no", "yes"), default=("no", "yes"), help="default: no,yes")
    add("--offload", type=_words("none", "cpu", "nvme"), default=("none", "cpu"), help="none, cpu, nvme (default: none,cpu)")
    add("--schedule", type=_schedules, default=("1f1b",), help="pipeline schedules (default: 1f1b)")
    add("--attention", type=_words("ulysses", "ring"), default=("ulysses",), help="with cp: ulysses, ring (default: ulysses)")
    add(
        "--split-sequences",
        type=_words("no", "yes"),
        default=("no",),
        help="with tp: Megatron's sequence parallelism: no, yes (default: no)",
    )
    add("--nvme-path", default="/tmp/zeroengine", metavar="FOLDER", help="of state on a disk, also for --measure (default %(default)s)")
    told = parser.add_argument_group("what is told")
    add = told.add_argument
    add("--top", type=positive, default=10, help="rows of the table (default %(default)s)")
    add("--write", default=None, metavar="FILE", help="writes the configuration of the best layout")
    add("--choose", type=positive, default=1, help="another row of the table than the first")
    add("--json", action="store_true", help="for programs")
    add("--measure", default=None, metavar="FILE", help="measures this machine for --gpus ranks, writes FILE, and ends")
    add(
        "--dry-run",
        action="store_true",
        help="builds mesh, layers and buckets of the one layout that the options leave, on the meta device",
    )
    return parser


def run(argv: Sequence[str]) -> int:
    """The exit code: 0, or 1 where no layout fits. Raises `ConfigError`."""
    given = build_parser().parse_args(list(argv))
    write = sys.stdout.write
    if given.measure is not None:
        from zeroengine.planner.measure import measure  # starts processes; nothing else needs it

        folder = Path(given.nvme_path)
        measured = measure(given.gpus, str(folder) if folder.is_dir() else None)
        measured.save(given.measure)
        write(f"{measured.name}: {measured.source}\nwrote {given.measure}\n")
        return 0
    if given.model is None:
        raise ConfigError("--model is missing: a folder with config.json, a model type, or python:module:factory")
    source = find_model(given.model, _overrides(given.set))
    job = _job(given, source)
    if given.dry_run:
        from zeroengine.planner.dryrun import dry_run  # makes a process group

        return dry_run(source, job, _only(given, job), write)
    planner = Planner(source, job)
    found = search(planner, _choices(given), _progress() if sys.stderr.isatty() else lambda done, total: None)
    if not found.tried:
        raise _none_left(job)
    if given.json:
        write(json.dumps(_facts(found, job, given.top), indent=1) + "\n")
    else:
        _tell(found, job, given, write)
    if found.fitting and given.write:
        chosen = _chosen(found, given.choose)
        write(_written(Path(given.write), chosen, found, job) + "".join(f"  {line}\n" for line in needs(chosen.layout, source)))
    return 0 if found.fitting else 1


def _written(path: Path, chosen: Plan, found: Found, job: Job) -> str:
    """Writes the configuration; what to say of it. Raises `ConfigError` where it cannot."""
    config = with_predictions(chosen.layout.config(job), chosen, found.fitting, f"runs/{path.stem}")
    try:
        path.write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror}; give a file in a folder that is there") from error
    return (
        f"wrote {path}: {chosen.layout.show()}\n"
        f"  the run keeps records; zerorun report {config['monitor']['run_dir']} shows what is predicted here beside what was measured\n"
    )


def needs(layout: Layout, source: ModelSource) -> list[str]:
    """What the script has to do beside giving the configuration."""
    told = []
    if layout.recompute and not source.takes_stages:
        told.append("the script calls model.gradient_checkpointing_enable() before zeroengine.initialize")
    if layout.pp > 1 and source.takes_stages:
        told.append(f"the script builds the model with num_stages={layout.pp}")
    return told


def _job(given: argparse.Namespace, source: ModelSource) -> Job:
    hardware = find_hardware(given.hardware)
    if given.gpus_per_node is not None:
        hardware = replace(hardware, per_node=given.gpus_per_node)
    memory = parse_memory(given.gpu_memory) if given.gpu_memory else hardware.memory
    longest = source.sequence()
    sequence = given.sequence or min(longest or 1024, 4096)
    if longest is not None and sequence > longest:
        raise ConfigError(f"--sequence {sequence}: the model has positions for {longest}")
    base: dict[str, Any] = {}
    if given.config is not None:
        from zeroengine.config import Config

        base = Config.load(given.config).to_dict()
    host = parse_memory(given.host_memory) / hardware.per_node if given.host_memory else float("inf")
    return Job(
        given.gpus, memory, sequence, given.batch or 4 * given.gpus, hardware, given.dtype, given.optimizer, host, base, given.nvme_path
    )


def _choices(given: argparse.Namespace) -> Choices:
    again, splits = (tuple(word == "yes" for word in words) for words in (given.recompute, given.split_sequences))
    return Choices(
        given.pp, given.dp_replicate, given.cp, given.tp, given.ep, given.stage, given.micro_batch, again, given.offload, given.schedule,
        splits, given.attention,
    )  # fmt: skip


def _only(given: argparse.Namespace, job: Job) -> Layout:
    found = list(_choices(given).layouts(job))
    if not found:
        raise _none_left(job)
    if len(found) > 1:
        raise ConfigError(
            f"--dry-run: the options leave {len(found)} layouts, from {found[0].show()} to {found[-1].show()}; it builds one, so give "
            "single values (--pp, --tp, --stage, --micro-batch, --recompute, --offload)"
        )
    return found[0]


def _none_left(job: Job) -> ConfigError:
    return ConfigError(
        f"the options leave no layout: pp x dp-replicate x cp x tp must divide the {job.ranks} ranks (--gpus), and micro-batch x the ranks "
        f"that read different data must divide the {job.batch} sequences of a step (--batch)"
    )


def _overrides(pairs: Iterable[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise ConfigError(f"--set {pair}: write KEY=VALUE")
        try:
            made[key] = json.loads(text)
        except json.JSONDecodeError:
            made[key] = text
    return made


def _tell(found: Found, job: Job, given: argparse.Namespace, write: Callable[[str], object]) -> None:
    hardware: Hardware = job.hardware
    batch = f"{job.batch} sequences of {job.sequence} tokens a step, {job.dtype}"
    write(f"{given.model}: {job.ranks} ranks of {size(job.memory)}, {batch}\n")
    write(f"{hardware.name}: {hardware.source}\n\n")
    if found.fitting:
        write(table(found.fitting, given.top) + "\n\n")
        write("\n".join(in_full(_chosen(found, given.choose), hardware)) + "\n\n")
    write("\n".join(summary(found)) + "\n")


def _chosen(found: Found, number: int) -> Plan:
    if not 1 <= number <= len(found.fitting):
        raise ConfigError(f"--choose {number}: {len(found.fitting)} layouts fit")
    return found.fitting[number - 1]


def _facts(found: Found, job: Job, top: int) -> dict[str, Any]:
    return {
        "hardware": job.hardware.name,
        "tried": found.tried,
        "plans": [
            {
                "layout": plan.layout.show(), "config": plan.layout.config(job), "accumulation": plan.accumulation,
                "memory": plan.fullest.memory.kinds(), "total": plan.fullest.memory.total, "seconds": plan.time.total,
                "bubble": plan.time.bubble, "sent": {str(r.rank): r.sent for r in plan.ranks}, "by_dim": sent_by_dim(plan),
            }
            for plan in found.fitting[:top]
        ],
        "too_large": [{"layout": p.layout.show(), "why": p.why_not} for p in found.too_large[:top]],
        "refused": [{"why": why, "layouts": count} for why, count in found.reasons()],
    }  # fmt: skip


def _progress() -> Callable[[int, int], None]:
    def told(done: int, total: int) -> None:
        sys.stderr.write(f"\r{done} of {total} layouts" + ("\n" if done == total else ""))
        sys.stderr.flush()

    return told
