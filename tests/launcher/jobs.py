"""Starts zerorun from the checkout on scripts written by the test, and looks for processes that it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ZERORUN = str(Path(__file__).parents[2] / "bin" / "zerorun")
BOUND = 60.0  # for a whole launch; torch is imported once, by the agent


@dataclass
class Job:
    """One launch. `mark` is in the environment of every process of it."""

    process: subprocess.Popen[str]
    mark: str
    out: str = ""
    err: str = ""
    seconds: float = 0.0  # of `finish`

    def finish(self, bound: float = BOUND) -> int:
        """Waits for the end; the exit code."""
        start = time.monotonic()
        try:
            self.out, self.err = self.process.communicate(timeout=bound)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise
        self.seconds = time.monotonic() - start
        return self.process.returncode

    def alive(self) -> list[int]:
        """Processes of the launch that are not zombies."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                marked = self.mark.encode() in Path("/proc", name, "environ").read_bytes()
                state = Path("/proc", name, "stat").read_text().rpartition(") ")[2][0]
            except OSError:
                continue
            if marked and state not in "ZX":
                found.append(int(name))
        return found

    def wait_gone(self, bound: float) -> list[int]:
        """Who is left after at most `bound` seconds."""
        return self.alive() if wait_until(lambda: not self.alive(), bound) is False else []

    def kill_all(self) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@dataclass
class Launches:
    """Starts jobs of one test and ends what is left of them."""

    folder: Path
    jobs: list[Job] = field(default_factory=list)

    def script(self, text: str, name: str = "job.py") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None, within: Sequence[str] = ()) -> Job:
        """`within`: a command that runs the rest of its line somewhere else."""
        mark = uuid.uuid4().hex
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}
        process = subprocess.Popen(
            [*within, sys.executable, ZERORUN, *argv],
            env={**clean, "TEST_OF_ZERORUN": mark, "FOLDER": str(self.folder), **(env or {})},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.jobs.append(Job(process, mark))
        return self.jobs[-1]

    def run(self, *argv: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Job:
        job = self.start(*argv, env=env, cwd=cwd)
        job.finish()
        return job

    def wait_for(self, *names: str, bound: float = BOUND) -> None:
        """Until the scripts have made files of these names in the folder."""
        missing = [n for n in names if not wait_until((self.folder / n).exists, bound)]
        if missing:
            raise TimeoutError(f"not made within {bound} s: {missing}")


def wait_until(condition: Callable[[], bool], bound: float) -> bool:
    end = time.monotonic() + bound
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
