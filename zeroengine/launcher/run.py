"""The command `run`: a script on several ranks of this node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zeroengine.launcher.options import parse, with_defaults
from zeroengine.launcher.supervisor import Supervisor


def say(text: str) -> None:
    """A message of the launcher on standard error, whole and at once: ranks' lines are written beside it."""
    data = f"zerorun: {text}\n".encode(errors="backslashreplace")
    while data:
        data = data[os.write(2, data) :]


def run(argv: Sequence[str]) -> int:
    plan, logs = parse(argv)
    plan, said = with_defaults(plan)
    if said:
        say(said)
    return Supervisor(plan, say, logs).run()
