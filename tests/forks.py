"""Processes that are forked from a server, which has imported what takes longer than most tests do (tests/preload/).

multiprocessing has one such server in a process. Here each module of tests/preload has its own, started when it is needed
first. What is read as a process starts, or while it imports, needs a new interpreter instead.
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import popen_forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest import mock


@functools.cache
def _server(name: str) -> ForkServer:
    server = ForkServer()
    server.set_forkserver_preload([f"tests.preload.{name}"])
    return server


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Forked) -> None:
        connect = _server(process_obj.server).connect_to_new_process
        with mock.patch.object(popen_forkserver.forkserver, "connect_to_new_process", connect):
            super()._launch(process_obj)


class Forked(ForkServerProcess):
    """A process that runs `target(*args)`, which are pickled, in a fork of the server that imported `tests.preload.<server>`."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], server: str = "engine") -> None:
        super().__init__(target=target, args=args, daemon=False)
        self.server = server

    @staticmethod
    def _Popen(process_obj: Forked) -> _Popen:
        return _Popen(process_obj)


@dataclass(frozen=True)
class Program:
    """A program that was started, and the files with what it writes (may be the same)."""

    process: subprocess.Popen[bytes] | Forked
    out: Path
    err: Path

    def running(self) -> bool:
        return self.process.poll() is None if isinstance(self.process, subprocess.Popen) else self.process.is_alive()

    def wait(self, seconds: float) -> None:
        """At most so long; kills it then."""
        if isinstance(self.process, subprocess.Popen):
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
            return
        self.process.join(seconds)
        if self.running():
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait() if isinstance(self.process, subprocess.Popen) else self.process.join()

    def code(self) -> int:
        """How it ended; minus the signal that ended it."""
        code = self.process.returncode if isinstance(self.process, subprocess.Popen) else self.process.exitcode
        if code is None:
            raise RuntimeError("it is still running")
        return code


def start_program(argv: Sequence[str], environment: dict[str, str], out: Path, err: Path, fresh: bool) -> Program:
    """Starts `python <argv>`: a file with its arguments, or -m with a module and its. `fresh`: in a new interpreter; otherwise in a
    fork that lacks what only such a one has: its own imports, and the taking down of an interpreter at the end."""
    out.touch()
    err.touch()
    if fresh:
        with out.open("ab") as to_out, err.open("ab") as to_err:
            return Program(subprocess.Popen([sys.executable, *argv], env=environment, stdout=to_out, stderr=to_err), out, err)
    forked = Forked(_as_program, (list(argv), environment, str(out), str(err)))
    forked.start()
    return Program(forked, out, err)


def _as_program(argv: list[str], environment: dict[str, str], out: str, err: str) -> None:
    for descriptor, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    _end(_run(argv))


def _run(argv: list[str]) -> object:
    """The argument of sys.exit."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # read by an interpreter that imports torch
    try:
        if argv[0] == "-m":
            sys.argv[:] = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = argv
            sys.path.insert(0, os.path.dirname(argv[0]))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end(code: object) -> None:
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)
