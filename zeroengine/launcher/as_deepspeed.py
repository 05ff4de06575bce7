"""Programs in which `import deepspeed` is zeroengine: by a folder in front of PYTHONPATH, which their children inherit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroengine.errors import ZeroEngineError

FOLDER = Path(__file__).resolve().parent.parent / "integrations" / "as_deepspeed"
USAGE = "usage: zerorun as-deepspeed PROGRAM [arguments of the program]"


def as_deepspeed() -> dict[str, str]:
    """The environment variables of such a program."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(FOLDER) + (os.pathsep + before if before else "")}


def run(argv: Sequence[str]) -> int:
    """Becomes the program. Raises `ZeroEngineError` if there is none of the name."""
    if not argv or argv[0] in ("-h", "--help"):
        (sys.stdout if argv else sys.stderr).write(USAGE + "\n")
        return 0 if argv else 2
    program = shutil.which(argv[0])
    if program is None:
        raise ZeroEngineError(f"as-deepspeed: no program {argv[0]} that can be executed. {USAGE}")
    os.execve(program, list(argv), {**os.environ, **as_deepspeed()})
