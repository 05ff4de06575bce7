"""What one launch is, as data: made by the command line, carried out by the supervisor and the agent."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """One job on one node. `mode` is "script", "module" or "exec" (any program); times are in seconds."""

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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        values = json.loads(text)
        for name in ("args", "show"):
            if values[name] is not None:
                values[name] = tuple(values[name])
        return Plan(**values)
