"""Turns what the launcher says about a job into what runs on this host, or says why it cannot run here."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import environment, machine
from zeroengine.launcher.hosts import visible_devices
from zeroengine.launcher.link import Message
from zeroengine.launcher.plan import Plan


@dataclass(frozen=True)
class Prepared:
    """The plan of this host, the environment of its agent, and a line for the user."""

    plan: Plan
    env: dict[str, str]
    said: str | None


def prepare(message: Message, own: Plan | None) -> Prepared:
    """`own`: the plan of a host where the user started the command; else it is in the message, with the environment and
    folder of the launcher. Raises `ZeroEngineError` or ValueError with what is missing here."""
    host = socket.gethostname()
    slots = message["slots"]
    if own is None:
        plan = Plan.from_dict(message["plan"])
        try:
            os.chdir(message["cwd"])
        except OSError as error:
            raise ZeroEngineError(
                f"the working folder {message['cwd']} is not there on {host} ({error.strerror}): "
                "share it between the hosts, or copy it there"
            ) from None
    else:
        plan = own
    env = environment.without_step(os.environ) | message["env"]
    if own is None and message["remote"]:
        _check_program(plan, env, host)
    if slots is None:
        nproc = plan.nproc or max(1, machine.gpu_count())
    else:
        nproc = len(slots)
    values = dict(plan.env)
    if slots is not None and message["chosen"]:
        both = env | values
        name = machine.device_variable(both)
        values[name] = visible_devices(both.get(name), slots)
    said = _threads(values, env, nproc)
    return Prepared(dataclasses.replace(plan, nproc=nproc, env=values), env, said)


def _check_program(plan: Plan, env: dict[str, str], host: str) -> None:
    program = plan.target if plan.mode == "exec" else plan.python
    if shutil.which(program, path=env.get("PATH")) is None:
        raise ZeroEngineError(f"there is no program {program} on {host} that can be executed")
    if plan.mode == "script" and not Path(plan.target).is_file():
        raise ZeroEngineError(f"there is no script {plan.target} in {Path.cwd()} on {host}")


def _threads(env: dict[str, str], outer: dict[str, str], nproc: int) -> str | None:
    """Shares the cores between the ranks, where the user did not; a line that says so."""
    if nproc < 2 or "OMP_NUM_THREADS" in outer or "OMP_NUM_THREADS" in env:
        return None
    cores = machine.physical_cores()
    share = max(1, cores // nproc)
    env["OMP_NUM_THREADS"] = str(share)
    return f"OMP_NUM_THREADS={share} for each of {nproc} ranks ({cores} cores); set it to choose another"
