"""The command `zerorun config check FILE`: what each key of a configuration does, without running anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from zeroengine.arguments import Parser, positive
from zeroengine.config.auto import FACTS
from zeroengine.config.batch import resolve_batch
from zeroengine.config.canonical import AUTO
from zeroengine.config.config import Config, Examined, examine
from zeroengine.config.differences import DIFFERENCES
from zeroengine.config.report import KeyReport, reports_of
from zeroengine.config.values import plain, show
from zeroengine.errors import ConfigError, ZeroEngineError

ACCEPTED, REFUSED = 0, 1
_CLASSES = {
    "honoured": "honoured", "ignored": "harmless", "refused": "REFUSED", "unknown": "UNKNOWN", "invalid": "INVALID",
    "auto": "AUTO", "comment": "comment",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Arguments of `zerorun config`; 0 if the configuration is accepted, 1 if it is refused. Raises `ZeroEngineError`
    for a wrong command line."""
    arguments = _parser().parse_args(list(argv))
    try:
        examined = examine(arguments.file, dict(map(_fact, arguments.fact)))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n{_verdict(False, arguments.file)}\n")
        return REFUSED
    accepted = examined.config is not None and not examined.problems
    lines = [_line(report, accepted) for report in reports_of(examined)]
    if accepted and examined.config is not None:
        accepted = _batch(examined.config, arguments.world, lines)
        lines += _absent(examined)
    sys.stdout.write("\n".join([*lines, _verdict(accepted, examined.origin), ""]))
    return ACCEPTED if accepted else REFUSED


def _parser() -> Parser:
    parser = Parser(prog="zerorun config", allow_abbrev=False, description="Explains a configuration file.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="check")
    check = commands.add_parser("check", allow_abbrev=False, help="what each key of a file does; exit code 1 if refused")
    check.add_argument("file", metavar="FILE", help="the JSON file")
    check.add_argument("--world", type=positive, metavar="N", help="check the batch sizes and degrees for N ranks")
    check.add_argument(
        "--fact", action="append", default=[], metavar="NAME=VALUE",
        help=f'answers "auto": a full key path, or one of {", ".join(FACTS)}',
    )  # fmt: skip
    return parser


def _fact(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ZeroEngineError(f"config: --fact {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _line(report: KeyReport, accepted: bool) -> str:
    shown = "" if isinstance(report.value, Mapping) and not report.effective else show(report.value)
    if report.kind == "honoured":
        effective = plain(report.effective)
        known = effective is not None or (report.value == AUTO and accepted)
        if known and show(effective) != shown:
            shown += f" -> {show(effective)}"
    return f"{_CLASSES[report.kind]:<9} {report.path:<55} {shown:<24} {report.text}".rstrip()


def _batch(config: Config, world: int | None, lines: list[str]) -> bool:
    """What the batch keys come to on `world` ranks; False if they do not fit."""
    if world is None:
        return True
    try:
        replicas = config.data_parallel_size(world)
        sizes = resolve_batch(config, replicas)
    except ConfigError as error:
        lines.append(f"REFUSED   {error}")
        return False
    lines.append(
        f"{world} ranks: train_batch_size {sizes.train} = train_micro_batch_size_per_gpu {sizes.micro} x "
        f"gradient_accumulation_steps {sizes.accumulation} x {replicas} data-parallel ranks"
    )
    return True


def _absent(examined: Examined) -> list[str]:
    """Keys that are not written and would give another model in DeepSpeed."""
    wanted = [d for d in DIFFERENCES if d.result and d.path not in examined.read.written and _applies(d.path, examined)]
    if not wanted:
        return []
    return ["absent keys that mean something else in DeepSpeed 0.19.8:"] + [
        f"  {d.path}: {d.here} (there: {d.deepspeed}); {d.why}" for d in wanted
    ]


def _applies(path: str, examined: Examined) -> bool:
    config = examined.config
    if config is None or path == "strict":
        return False
    if path.startswith("optimizer."):
        section = config.optimizer
        if section is None or section.type != "Adam" or "adam_w_mode" in section.params:
            return False
        return section.params.get("weight_decay", 0) not in (0, "0")
    if path in ("data_types.grad_accum_dtype", "communication_data_type", "data_types.keep_in_fp32_modules"):
        return config.dtype != "fp32"
    return True


def _verdict(accepted: bool, origin: str) -> str:
    return f"{origin}: {'accepted' if accepted else 'refused'}"
