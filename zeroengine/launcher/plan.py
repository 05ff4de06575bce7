"""What a launch is, as data: made by the command line, carried out by the launcher and the hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroengine.launcher.hosts import Host


@dataclass(frozen=True)
class Plan:
    """What runs on one host. `mode` is "script", "module" or "exec" (any program); times are in seconds."""

    nproc: int
    mode: str
    target: str
    args: tuple[str, ...] = ()
    python: str = "python3"
    env: dict[str, str] = field(default_factory=dict)
    master_port: int = 0  # 0: a free one
    max_restarts: int = 0
    grace: float = 5.0  # between asking a process to end and killing it
    tee: bool = False
    show: tuple[int, ...] | None = None  # ranks whose output reaches the console; None: all
    prefix: bool = True
    verbose: bool = False

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Plan:
        """From the plan as a dict that travelled as JSON."""
        values = dict(values)
        for name in ("args", "show"):
            if values[name] is not None:
                values[name] = tuple(values[name])
        return Plan(**values)


@dataclass(frozen=True)
class Part:
    """One host's place in an attempt. The first host keeps the store at `port` (0: a free one)."""

    attempt: int
    index: int
    nodes: int
    address: str  # of the first host, as all others reach it
    interface: str = ""  # for the ranks' connections, as the user chose; empty: the one that leads to `peer`
    peer: str = ""
    port: int = 0
    patience: float = 30.0  # seconds within which the first host must be reached


@dataclass(frozen=True)
class Job:
    """A launch over hosts. One host, this one, is a job like any other."""

    plan: Plan
    hosts: tuple[Host, ...] = (Host("localhost"),)
    transport: str = "local"
    transport_args: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    sizes: tuple[int, ...] | None = None  # numbers of ranks that the batch can be kept with; None: all
    node_rank: int | None = None  # of this host, where the same command is started on each
    master_addr: str | None = None
    launcher_addr: str | None = None
    interface: str | None = None
    remote_python: str | None = None
    connect_timeout: float = 60.0  # for a host to answer, and to be reached by the others
    node_timeout: float = 4.0  # a host that is silent for so long is lost
    env: dict[str, str] = field(default_factory=dict)  # for hosts other than this one
    logs: Path | None = None

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.max_nodes
