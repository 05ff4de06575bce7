"""Command line of `zerorun [options] script.py args...`: parsed and checked before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroengine.arguments import Parser
from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import environment, machine
from zeroengine.launcher.as_deepspeed import as_deepspeed
from zeroengine.launcher.hosts import Host
from zeroengine.launcher.plan import Job, Plan
from zeroengine.launcher.where import TRANSPORTS, arguments_of_launcher, forwarded, sizes, where
from zeroengine.wording import did_you_mean

USAGE = "zerorun [options] script.py [arguments of the script]"


def build_parser() -> Parser:
    parser = Parser(prog="zerorun", usage=USAGE, add_help=False, allow_abbrev=False)
    ranks = parser.add_argument_group("ranks")
    nproc = ("--nproc", "--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus")
    ranks.add_argument(
        *nproc,
        default="auto",
        metavar="N",
        help="ranks to start: a number; auto (default): one for each GPU, one where there is none; gpu: one for each GPU",
    )
    ranks.add_argument("-m", "--module", action="store_true", help="the target is a module, as in python -m")
    ranks.add_argument("--no-python", "--no_python", action="store_true", help="the target is a program of any kind")
    ranks.add_argument(
        "--as-deepspeed", "--as_deepspeed", action="store_true", help="`import deepspeed` is zeroengine in all programs of the job"
    )
    ranks.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter of the ranks (default: this one)")
    ranks.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="sets a variable for the ranks; without a value, passes on one that is set, or all that match PATTERN*",
    )
    ranks.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        default=0,
        metavar="PORT",
        help="port where the ranks meet (default: a free one)",
    )
    _add_hosts(parser.add_argument_group("hosts"))
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
    output.add_argument("--log-dir", "--log_dir", metavar="DIR", help="writes rankN.out and rankN.err there in place of the console")
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


def _add_hosts(hosts: argparse._ArgumentGroup) -> None:
    def add(name: str, *more: str, **settings: Any) -> None:
        alias = [name.replace("-", "_").replace("__", "--", 1)] if "-" in name[2:] else []
        hosts.add_argument(name, *alias, *more, **settings)

    add("--hostfile", metavar="FILE", help="lines of HOST slots=N; ranks are started in this order")
    add("--include", "-i", metavar="LIST", help="only these hosts and slots, as in node1@node2:0,2-3; slots count the visible devices")
    add("--exclude", "-e", metavar="LIST", help="all but these")
    add("--nnodes", "--num-nodes", "--num_nodes", metavar="N|MIN:MAX",
        help="the first N hosts; MIN:MAX: goes on with fewer when hosts are lost, and with more when they come")  # fmt: skip
    add("--launcher", choices=TRANSPORTS, default="auto", metavar="NAME",
        help="how hosts are reached: " + ", ".join(TRANSPORTS) + " (default: ssh with a hostfile, slurm in an allocation)")  # fmt: skip
    add("--launcher-args", action="append", default=[], metavar="ARGS", help="further arguments of ssh, pdsh, mpirun or srun")
    add("--no-ssh", action="store_true", help="the same command is started on each host, by Kubernetes or by hand")
    add("--node-rank", type=int, metavar="K", help="with --no-ssh: which host this is, from 0")
    add("--master-addr", metavar="HOST", help="address of the first host for the others (default: from the way to it)")
    add("--launcher-addr", metavar="HOST", help="with pdsh, mpi, slurm: address of this host for the others (default: likewise)")
    add("--interface", metavar="NAME", help="network interface of the ranks (default: the one that leads to the first host)")
    add("--remote-python", metavar="PATH", help="interpreter of zerorun on other hosts (default: the same path as here)")
    add("--connect-timeout", type=float, default=60.0, metavar="SECONDS", help="for a host to answer (default: 60)")
    add("--node-timeout", type=float, default=4.0, metavar="SECONDS", help="a host that is silent for so long is lost (default: 4)")
    add("--elastic-config", metavar="FILE", help="with --nnodes MIN:MAX: runs only with as many ranks as its `elasticity` admits")


def split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options, and the target with its arguments, which are passed on untouched."""
    known = parser._option_string_actions
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "-":
        if argv[i] == "--":
            return list(argv[:i]), list(argv[i + 1 :])
        name = argv[i].partition("=")[0]
        if name not in known:
            raise ZeroEngineError(f"unknown option {name}: {did_you_mean(name, known, 'options of the script go after it')}")
        i += 1 if "=" in argv[i] or known[name].nargs == 0 else 2
    return list(argv[:i]), list(argv[i:])


def parse(argv: Sequence[str]) -> Job:
    """The job of a command line; raises a ZeroEngineError that names the option at fault."""
    parser = build_parser()
    own, target = split(parser, argv)
    options = parser.parse_args(own)
    if not target:
        raise ZeroEngineError(f"no script given. Usage: {USAGE}")
    if options.module and options.no_python:
        raise ZeroEngineError("--module and --no-python exclude each other")
    mode = "module" if options.module else "exec" if options.no_python else "script"
    _check_numbers(options)
    asked = None if options.nproc == "auto" else _nproc(options.nproc)
    place = where(options, asked, os.environ)
    far = place.transport != "local"
    nproc = asked if asked is not None else 0 if far else _slots(place.hosts) or _nproc("auto")
    world = sum(len(h.slots) if h.slots is not None else nproc for h in place.hosts) if place.transport != "none" else 0
    known = world if all(h.slots is not None or nproc for h in place.hosts) and place.transport != "none" else None
    plan = Plan(
        nproc=nproc,
        mode=mode,
        target=_target(mode, target[0]),
        args=tuple(target[1:]),
        python=_program(options.python, "--python"),
        env={**environment.asked(options.env, os.environ), **(as_deepspeed() if options.as_deepspeed else {})},
        master_port=place.master_port,
        max_restarts=options.max_restarts,
        grace=options.grace,
        tee=options.tee,
        show=_ranks(options.show, known) if options.show is not None else None,
        prefix=(known is None or known > 1) if options.ranks_prefix is None else options.ranks_prefix,
        verbose=options.verbose,
    )
    if place.transport == "local" and plan.master_port:
        machine.check_port(plan.master_port)
    if plan.tee and options.log_dir is None:
        raise ZeroEngineError("--tee needs --log-dir: without it all output is on the console")
    return Job(
        plan=_with_width(plan, known or nproc),
        hosts=place.hosts,
        transport=place.transport,
        transport_args=arguments_of_launcher(options.launcher_args),
        min_nodes=place.min_nodes,
        max_nodes=place.max_nodes,
        sizes=sizes(options.elastic_config),
        node_rank=place.node_rank,
        master_addr=place.master_addr,
        launcher_addr=options.launcher_addr,
        interface=options.interface,
        remote_python=options.remote_python,
        connect_timeout=options.connect_timeout,
        node_timeout=options.node_timeout,
        env=forwarded(os.environ) if far else {},
        logs=_log_dir(options.log_dir),
    )


def build_check_parser() -> Parser:
    """Options of `zerorun check`: those that say where, and two of its own."""
    usage = "zerorun check --hostfile FILE [options]"
    parser = Parser(prog="zerorun check", usage=usage, add_help=False, allow_abbrev=False)
    _add_hosts(parser.add_argument_group("hosts"))
    own = parser.add_argument_group("what is looked at")
    own.add_argument("--master-port", "--master_port", type=int, default=0, metavar="PORT", help="a port that must be free on all hosts")
    own.add_argument("--folder", default=".", metavar="DIR", help="a folder that all hosts must share (default: this one)")
    return parser


def parse_hosts(argv: Sequence[str]) -> tuple[Job, str]:
    """The job of `zerorun check`, which runs nothing, and the folder."""
    options = build_check_parser().parse_args(list(argv))
    options.grace, options.max_restarts = 0.0, 0
    _check_numbers(options)
    place = where(options, 1, os.environ)
    if place.transport in ("local", "none"):
        raise ZeroEngineError("check needs the hosts: give --hostfile, or start it inside a Slurm allocation")
    plan = Plan(1, "exec", sys.executable, master_port=options.master_port)
    job = Job(
        plan, tuple(dataclasses.replace(host, slots=(0,), chosen=False) for host in place.hosts), place.transport,
        arguments_of_launcher(options.launcher_args), len(place.hosts), len(place.hosts), launcher_addr=options.launcher_addr,
        interface=options.interface, remote_python=options.remote_python, connect_timeout=options.connect_timeout, node_timeout=30.0,
        env=forwarded(os.environ),
    )  # fmt: skip
    return job, options.folder


def _check_numbers(options: argparse.Namespace) -> None:
    if options.max_restarts < 0:
        raise ZeroEngineError(f"--max-restarts {options.max_restarts}: 0 or more")
    if not 0 <= options.grace < 86400:
        raise ZeroEngineError(f"--grace {options.grace:g}: seconds, 0 or more")
    if not 0 <= options.master_port < 65536:
        raise ZeroEngineError(f"--master-port {options.master_port}: a port is a number from 1 to 65535")
    for name in ("connect_timeout", "node_timeout"):
        if not 0 < (value := getattr(options, name)) < 86400:
            raise ZeroEngineError(f"--{name.replace('_', '-')} {value:g}: seconds, more than 0")


def _slots(hosts: Sequence[Host]) -> int:
    return len(hosts[0].slots or ())


def _with_width(plan: Plan, ranks: int) -> Plan:
    """Ranks write to a pipe and cannot ask for the width of the terminal."""
    if not sys.stderr.isatty() or "COLUMNS" in os.environ or "COLUMNS" in plan.env:
        return plan
    width = shutil.get_terminal_size().columns - (len(f"[rank{ranks - 1}] ") if plan.prefix else 0)
    return dataclasses.replace(plan, env={**plan.env, "COLUMNS": str(max(20, width))})


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


def _ranks(text: str, world: int | None) -> tuple[int, ...]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            ranks.update(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise ZeroEngineError(f"--show {text}: ranks and ranges of ranks, as in 0,2-3") from None
    if not ranks or (world is not None and max(ranks) >= world):
        raise ZeroEngineError(f"--show {text}: the ranks are 0 to {(world or 1) - 1}")
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
