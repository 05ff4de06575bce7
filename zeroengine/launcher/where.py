"""From the command line and the environment: which hosts, how they are reached, what goes with the job to them."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroengine.addresses import unbracketed
from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import environment, machine, network, schedulers
from zeroengine.launcher.hosts import Host, filtered, limited, read_hostfile

TRANSPORTS = ("auto", "local", "ssh", "pdsh", "mpi", "slurm")
_DEFAULT_PORT = 29400
_HERE = (Host("localhost"),)


@dataclass(frozen=True)
class Where:
    """The part of a job that says where it runs."""

    transport: str
    hosts: tuple[Host, ...] = _HERE
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int = 0


def where(options: argparse.Namespace, nproc: int | None, environ: Mapping[str, str]) -> Where:
    """`nproc` None: as each host has slots or GPUs. Raises `ZeroEngineError` that names the option at fault."""
    transport = _transport(options, environ)
    if transport == "none":
        return _same_command(options, environ)
    if transport == "local":
        if options.master_addr is not None:
            raise ZeroEngineError("--master-addr needs several hosts: give --hostfile, or --no-ssh and --nnodes")
        hosts = _local_filtered(options, nproc)
        low, high = nodes_of(options.nnodes)
        if (low or 1) > 1 or (high or 1) > 1:
            how = "give --hostfile, or --no-ssh where each host starts the command itself"
            raise ZeroEngineError(f"--nnodes {options.nnodes}: which hosts? {how}")
        return Where("local", hosts, master_port=options.master_port)
    master = None if options.master_addr is None else unbracketed(options.master_addr)
    hosts = schedulers.slurm_hosts(environ) if transport == "slurm" and options.hostfile is None else _from_file(options)
    low, high = nodes_of(options.nnodes)
    hosts = filtered(hosts, options.include, options.exclude)
    if low != high and low is not None:
        if transport == "mpi":
            raise ZeroEngineError("--nnodes MIN:MAX: mpirun ends all hosts when one is lost; use --launcher ssh")
        if len(hosts) < low:
            raise ZeroEngineError(f"--nnodes {options.nnodes}, but there are {len(hosts)} hosts")
        hosts, high = limited(hosts, min(high or low, len(hosts)), nproc), min(high or low, len(hosts))
        return Where(transport, hosts, low, high, None, master, options.master_port)
    hosts = limited(hosts, low, nproc)
    return Where(transport, hosts, len(hosts), len(hosts), None, master, options.master_port)


def nodes_of(text: str | None) -> tuple[int | None, int | None]:
    """`N` or `MIN:MAX`."""
    if text is None:
        return None, None
    low, colon, high = text.partition(":")
    if not low.isdigit() or (colon and not high.isdigit()) or int(low) < 1 or (colon and int(high) < int(low)):
        raise ZeroEngineError(f"--nnodes {text}: a number of hosts from 1, or MIN:MAX")
    return int(low), int(high if colon else low)


def _transport(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    named, hostfile = options.launcher, options.hostfile is not None
    if options.no_ssh:
        if hostfile or named not in ("auto", "local"):
            raise ZeroEngineError("--no-ssh: every host starts the command itself, so --hostfile and --launcher have no place beside it")
        return "none"
    if named in ("ssh", "pdsh", "mpi") and not hostfile:
        raise ZeroEngineError(f"--launcher {named} needs --hostfile")
    if named == "local" and hostfile:
        raise ZeroEngineError("--launcher local is this host alone; leave --hostfile out")
    if named != "auto":
        return str(named)
    if hostfile:
        return "ssh"
    if options.node_rank is not None:
        return "none"
    if schedulers.in_slurm_step(environ) and environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
        return "none"
    several = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1")) != "1"
    return "slurm" if schedulers.in_slurm_allocation(environ) and several and options.nnodes != "1" else "local"


def _from_file(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hostfile is None:
        raise ZeroEngineError("--hostfile is missing")
    return read_hostfile(options.hostfile)


def _local_filtered(options: argparse.Namespace, nproc: int | None) -> tuple[Host, ...]:
    """`--include localhost:0,2` on one node picks devices of the visible list."""
    if options.include is None and options.exclude is None:
        return _HERE
    known = tuple(range(nproc or machine.gpu_count() or 1)) if options.exclude is not None else None
    hosts = filtered((Host("localhost", slots=known),), options.include, options.exclude)
    if options.include is not None and nproc is not None and hosts[0].slots is not None and len(hosts[0].slots) != nproc:
        raise ZeroEngineError(f"--nproc {nproc}, but --include {options.include} has {len(hosts[0].slots)} slots")
    return hosts


def _same_command(options: argparse.Namespace, environ: Mapping[str, str]) -> Where:
    """Each host starts the command. The first is where the others come to."""
    known = schedulers.place(environ)
    low, high = nodes_of(options.nnodes)
    low, high = low or known.nodes, high or known.nodes
    rank = options.node_rank if options.node_rank is not None else known.rank
    master = options.master_addr or known.master
    if low is None or high is None:
        raise ZeroEngineError("--no-ssh: how many hosts? Give --nnodes N or MIN:MAX (no scheduler's variable says it)")
    if rank is None and low == high:
        raise ZeroEngineError("--no-ssh: which of the hosts is this? Give --node-rank 0 to N-1 (no scheduler's variable says it)")
    if rank is None and master is not None and network.is_local(master):
        rank = 0
    if rank is not None and not 0 <= rank < high:
        raise ZeroEngineError(f"--node-rank {rank}: the hosts are 0 to {high - 1}")
    if master is None and high > 1:
        raise ZeroEngineError("--no-ssh: where is host 0? Give --master-addr (no scheduler's variable says it)")
    master = None if master is None else unbracketed(master)
    for name in ("include", "exclude"):
        if getattr(options, name) is not None:
            raise ZeroEngineError(f"--{name} has no place beside --no-ssh: the hosts are those where the command is started")
    port = options.master_port or known.port or _DEFAULT_PORT
    return Where("none", _HERE, low, high, rank, master or "127.0.0.1", port)


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for other hosts, without what `--env` sets for all."""
    return environment.by_rule(environ) | environment.listed([Path.home(), Path.cwd()], environ)


def arguments_of_launcher(texts: list[str]) -> tuple[str, ...]:
    """`--launcher-args 'A B' --launcher-args C`, each split as a shell would."""
    try:
        return tuple(word for text in texts for word in shlex.split(text))
    except ValueError as error:
        raise ZeroEngineError(f"--launcher-args: {error}") from None


def sizes(path: str | None) -> tuple[int, ...] | None:
    """Numbers of ranks that the `elasticity` of a configuration admits; None without one."""
    if path is None:
        return None
    from zeroengine.config import Config  # reads with pydantic, which takes its time to start

    if not os.path.isfile(path):
        raise ZeroEngineError(f"--elastic-config {path}: no such file")
    return Config.load(path).world_sizes()
