"""The command `run`: a script on several ranks of this host, or of many."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zeroengine.launcher.dialling import dial, read_token
from zeroengine.launcher.node import Node
from zeroengine.launcher.options import parse
from zeroengine.launcher.outputs import OwnConsole
from zeroengine.launcher.plan import Job
from zeroengine.launcher.supervisor import Supervisor


def run(argv: Sequence[str]) -> int:
    job = parse(argv)
    if job.transport == "none" and job.node_rank != 0:
        return follow(job)
    return Supervisor(job).run()


def follow(job: Job) -> int:
    """This host is not the first of those where the command was started: it runs its part, and the first host leads."""
    connection = dial(job.master_addr or "", job.plan.master_port, job.connect_timeout)
    name = "" if job.node_rank is None else str(job.node_rank)
    return Node(connection, os.dup(connection), name, read_token(None), job.plan, OwnConsole(job.plan, job.logs)).run()
