"""What schedulers and other launchers say in the environment: the hosts of an allocation, or this host's place among others.

Pure functions of the environment, so that they can be tried on recorded ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher.hosts import Host, expand

_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# Variables of one scheduler: this host's number, how many there are, where the first is and its port.
_PLACES = (
    ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT"),  # Kubeflow's training operator
    ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("PMI_RANK", "PMI_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("JOB_COMPLETION_INDEX", "NNODES", "MASTER_ADDR", "MASTER_PORT"),  # an indexed Job of Kubernetes
)


def split_nodelist(text: str) -> tuple[str, ...]:
    """Slurm's short form of names: `n[1-3,7],m2` is n1, n2, n3, n7, m2. Raises ValueError."""
    parts, depth, at = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[at:i])
            at = i + 1
    return tuple(name for part in (*parts, text[at:]) if part for name in expand(part))


def _counts(text: str) -> list[int]:
    """`4(x2),1` is [4, 4, 1]."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of counts")
        found += [int(match.group(1))] * int(match.group(2) or 1)
    return found


def in_slurm_allocation(environ: Mapping[str, str]) -> bool:
    """True in the shell of salloc or the script of sbatch, where srun starts steps; false inside a step."""
    return "SLURM_JOB_NODELIST" in environ and not in_slurm_step(environ)


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """True in a task of srun. The script of sbatch and the shell of salloc have no step, or one that runs no tasks of the
    user's (salloc's interactive step, whose number is near 2 to the 32nd)."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFF00 and "SLURM_STEP_NUM_TASKS" in environ


def slurm_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of the allocation. Slots are the tasks that were asked for on each; with GPUs, those that are there.

    Raises `ZeroEngineError` outside an allocation and for lists that cannot be read.
    """
    if "SLURM_JOB_NODELIST" not in environ:
        raise ZeroEngineError("--launcher slurm: SLURM_JOB_NODELIST is not set; start zerorun inside salloc or sbatch")
    try:
        names = split_nodelist(environ["SLURM_JOB_NODELIST"])
        tasks = _counts(environ["SLURM_TASKS_PER_NODE"]) if "SLURM_TASKS_PER_NODE" in environ else []
    except ValueError as error:
        raise ZeroEngineError(f"the environment of Slurm cannot be read: {error}") from None
    per_node = environ.get("SLURM_NTASKS_PER_NODE", "")
    if any(environ.get(name) for name in _GPUS) or not (per_node.isdigit() or len(tasks) == len(names)):
        return tuple(Host(name) for name in names)
    counts = [int(per_node)] * len(names) if per_node.isdigit() else tasks
    return tuple(Host(name, slots=tuple(range(count))) for name, count in zip(names, counts, strict=True))


@dataclass(frozen=True)
class Place:
    """This host's place among those where the same command was started. What is not known is None."""

    rank: int | None = None
    nodes: int | None = None
    master: str | None = None
    port: int | None = None


def place(environ: Mapping[str, str]) -> Place:
    """From the variables of whoever started this process on several hosts. Raises `ZeroEngineError` where they make no
    sense, as with several processes on one host: zerorun starts the ranks of a host itself."""
    if in_slurm_step(environ):
        return _slurm_place(environ)
    for rank, nodes, master, port in _PLACES:
        if environ.get(rank):
            local = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", environ.get("MPI_LOCALNRANKS", "1"))
            if rank.startswith(("OMPI", "PMI")) and local not in ("", "1"):
                raise ZeroEngineError(f"mpirun started zerorun {local} times on this host; once is enough: it starts the ranks itself")
            size = environ.get(nodes, "").partition(":")[2] or environ.get(nodes, "")
            return Place(_number(rank, environ), int(size) if size.isdigit() else None, environ.get(master), _number(port, environ))
    return Place(None, None, environ.get("MASTER_ADDR"), _number("MASTER_PORT", environ))


def _slurm_place(environ: Mapping[str, str]) -> Place:
    tasks, nodes = environ["SLURM_STEP_NUM_TASKS"], environ.get("SLURM_STEP_NUM_NODES", "")
    if tasks != nodes:
        raise ZeroEngineError(f"srun started zerorun {tasks} times on {nodes} nodes; use --ntasks-per-node=1: it starts the ranks itself")
    try:
        first = split_nodelist(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "")))[:1]
    except ValueError as error:
        raise ZeroEngineError(f"the environment of Slurm cannot be read: {error}") from None
    # One port for all of the job, which every node can work out, and other jobs on these nodes do not use.
    port = 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000
    return Place(_number("SLURM_NODEID", environ), int(nodes), environ.get("MASTER_ADDR") or (first or (None,))[0],
                 _number("MASTER_PORT", environ) or port)  # fmt: skip


def _number(name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdigit():
        raise ZeroEngineError(f"environment variable {name}={text!r} is not a number")
    return int(text)
