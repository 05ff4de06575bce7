"""Command line of `zerorun [options] script.py args...`: parsed and checked before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import machine
from zeroengine.launcher.as_deepspeed import as_deepspeed
from zeroengine.launcher.plan import Plan

USAGE = "zerorun [options] script.py [arguments of the script]"


class Parser(argparse.ArgumentParser):
    """Raises the package's error in place of ending the process."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ZeroEngineError(f"{message} (zerorun --help lists the options)")


def build_parser() -> Parser:
    parser = Parser(prog="zerorun", usage=USAGE, add_help=False, allow_abbrev=False)
    ranks = parser.add_argument_group("ranks")
    nproc = ("--nproc", "--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus")
    ranks.add_argument(
        *nproc,
        default="auto",
        metavar="N",
        help="ranks to start: a number; auto (default): one for "
        "each GPU, one where there is none; gpu: one for each GPU",
    )
    ranks.add_argument("-m", "--module", action="store_true", help="the target is a module, as in python -m")
    ranks.add_argument("--no-python", "--no_python", action="store_true", help="the target is a program of any kind")
    ranks.add_argument(
        "--as-deepspeed", "--as_deepspeed", action="store_true", help="`import deepspeed` is zeroengine in all programs of the job"
    )
    ranks.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="interpreter of the ranks (default: this one)"
    )
    ranks.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="sets a variable for the ranks; without a value, passes on one that is set",
    )
    ranks.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        default=0,
        metavar="PORT",
        help="port where the ranks meet (default: a free one)",
    )
    ends = parser.add_argument_group("ends")
    ends.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="starts all ranks again up to N times after a failure (default: 0)",
    )
    ends.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="between asking a rank to end (SIGTERM) and killing it (default: 5)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-dir", "--log_dir", metavar="DIR", help="writes rankN.out and rankN.err there in place of the console"
    )
    output.add_argument("--tee", action="store_true", help="with --log-dir: to the console as well")
    output.add_argument("--show", metavar="RANKS", help="only these ranks on the console, as in 0 or 0,2-3")
    output.add_argument(
        "--ranks-prefix",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="starts each line with [rankN] (default: with more than one rank)",
    )
    output.add_argument("--verbose", action="store_true", help="the elastic agent's own messages too")
    return parser


def split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options, and the target with its arguments, which are passed on untouched."""
    known = parser._option_string_actions
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "-":
        if argv[i] == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        name = argv[i].partition("=")[0]
        if name not in known:
            near = difflib.get_close_matches(name, list(known), 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ZeroEngineError(f"unknown option {name}{hint} (options of the script go after it)")
        i += 1 if "=" in argv[i] or known[name].nargs == 0 else 2
    return list(argv[:i]), list(argv[i:])


def parse(argv: Sequence[str]) -> tuple[Plan, Path | None]:
    """The plan of a launch and its folder of logs; raises a ZeroEngineError that names the option at fault."""
    parser = build_parser()
    own, target = split(parser, argv)
    options = parser.parse_args(own)
    if not target:
        raise ZeroEngineError(f"no script given. Usage: {USAGE}")
    if options.module and options.no_python:
        raise ZeroEngineError("--module and --no-python exclude each other")
    mode = "module" if options.module else "exec" if options.no_python else "script"
    nproc = _nproc(options.nproc)
    prefix = nproc > 1 if options.ranks_prefix is None else options.ranks_prefix
    plan = Plan(
        nproc=nproc,
        mode=mode,
        target=_target(mode, target[0]),
        args=tuple(target[1:]),
        python=_program(options.python, "--python"),
        env={**_environment(options.env), **(as_deepspeed() if options.as_deepspeed else {})},
        master_port=options.master_port,
        max_restarts=options.max_restarts,
        grace=options.grace,
        tee=options.tee,
        show=_ranks(options.show, nproc) if options.show is not None else None,
        prefix=prefix,
        verbose=options.verbose,
    )
    if plan.max_restarts < 0:
        raise ZeroEngineError(f"--max-restarts {plan.max_restarts}: 0 or more")
    if not 0 <= plan.grace < 86400:
        raise ZeroEngineError(f"--grace {plan.grace:g}: seconds, 0 or more")
    if not 0 <= plan.master_port < 65536:
        raise ZeroEngineError(f"--master-port {plan.master_port}: a port is a number from 1 to 65535")
    if plan.master_port:
        machine.check_port(plan.master_port)
    if plan.tee and options.log_dir is None:
        raise ZeroEngineError("--tee needs --log-dir: without it all output is on the console")
    return plan, _log_dir(options.log_dir)


def with_defaults(plan: Plan) -> tuple[Plan, str | None]:
    """The plan with the environment that ranks need and the user did not set; and a line that says so."""
    env, said = dict(plan.env), None
    if plan.nproc > 1 and "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in env:
        cores = machine.physical_cores()
        share = max(1, cores // plan.nproc)
        env["OMP_NUM_THREADS"] = str(share)
        said = f"OMP_NUM_THREADS={share} for each of {plan.nproc} ranks ({cores} cores); set it to choose another"
    if sys.stderr.isatty() and "COLUMNS" not in os.environ:  # ranks write to a pipe and cannot ask for the width
        width = shutil.get_terminal_size().columns - (len(f"[rank{plan.nproc - 1}] ") if plan.prefix else 0)
        env.setdefault("COLUMNS", str(max(20, width)))
    return dataclasses.replace(plan, env=env), said


def _nproc(text: str) -> int:
    if text in ("auto", "gpu"):
        gpus = machine.gpu_count()
        if text == "gpu" and gpus == 0:
            raise ZeroEngineError("--nproc gpu: torch sees no GPU here; --nproc N starts N ranks on the CPU")
        return max(1, gpus)
    try:
        nproc = int(text)
    except ValueError:
        raise ZeroEngineError(f"--nproc {text}: a number, auto or gpu") from None
    if nproc < 1:
        raise ZeroEngineError(f"--nproc {nproc}: at least one rank is needed")
    return nproc


def _target(mode: str, target: str) -> str:
    if mode == "exec":
        return _program(target, "--no-python")
    if mode == "module":
        return target
    path = Path(target)
    if path.is_dir():
        raise ZeroEngineError(f"{target} is a folder, not a script (a package is run with --module)")
    if not path.is_file():
        hint = ""
        if path.with_name(path.name + ".py").is_file():
            hint = f"; did you mean {target}.py?"
        elif "/" not in target and not target.endswith(".py"):
            hint = "; a module is run with --module, another program with --no-python"
        raise ZeroEngineError(f"no script {target} in {Path.cwd()}{hint}")
    if not os.access(path, os.R_OK):
        raise ZeroEngineError(f"script {target} cannot be read (permissions)")
    return target


def _program(name: str, option: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ZeroEngineError(f"{option}: no program {name} that can be executed")
    return found


def _environment(settings: Sequence[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name:
            raise ZeroEngineError(f"--env {setting!r}: NAME or NAME=VALUE")
        if not equals and name not in os.environ:
            raise ZeroEngineError(f"--env {name}: it is not set here; give it a value with --env {name}=VALUE")
        env[name] = value if equals else os.environ[name]
    return env


def _ranks(text: str, nproc: int) -> tuple[int, ...]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            ranks.update(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise ZeroEngineError(f"--show {text}: ranks and ranges of ranks, as in 0,2-3") from None
    if not ranks or max(ranks) >= nproc:
        raise ZeroEngineError(f"--show {text}: the ranks are 0 to {nproc - 1}")
    return tuple(sorted(ranks))


def _log_dir(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ZeroEngineError(f"--log-dir {name} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ZeroEngineError(f"--log-dir {name} cannot be written (permissions)")
    return path
