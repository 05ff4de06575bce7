"""Processes that are forked from a server, which has imported what takes longer than most tests do (tests/preload/).

multiprocessing has one such server in a process. Here each module of tests/preload has its own, started when it is needed
first. What is read as a process starts, or while it imports, needs a new interpreter instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import popen_forkserver, reduction
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


class Program:
    """A program that was started."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked) -> None:
        self._process = process

    def running(self) -> bool:
        return self._process.poll() is None if isinstance(self._process, subprocess.Popen) else self._process.is_alive()

    def wait(self, seconds: float) -> None:
        """At most so long; kills it then."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        else:
            self._process.join(seconds)
        if self.running():
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait() if isinstance(self._process, subprocess.Popen) else self._process.join()

    def code(self) -> int:
        """How it ended; minus the signal that ended it."""
        code = self._process.returncode if isinstance(self._process, subprocess.Popen) else self._process.exitcode
        if code is None:
            raise RuntimeError("it is still running")
        return code


def start_program(argv: Sequence[str], environment: dict[str, str], streams: Sequence[int], fresh: bool = False) -> Program:
    """Starts `python <argv>`: a file with its arguments, or -m with a module and its.

    Args:
        streams: descriptors of its standard input, output and error output.
        fresh: in a new interpreter; otherwise in a fork, which lacks what only such a one has: imports of its own, and the taking down of
            an interpreter at the end.
    """
    stdin, stdout, stderr = streams
    if fresh:
        return Program(subprocess.Popen([sys.executable, *argv], env=environment, stdin=stdin, stdout=stdout, stderr=stderr))
    forked = Forked(_as_program, (list(argv), environment, [_Handed(stream) for stream in streams]))
    forked.start()
    return Program(forked)


@contextlib.contextmanager
def written_to(out: Path, err: Path) -> Iterator[tuple[int, int, int]]:
    """Streams for `start_program`: no input, and output to files, which may be one."""
    with open(os.devnull, "rb") as none, out.open("ab") as to_out, err.open("ab") as to_err:
        yield none.fileno(), to_out.fileno(), to_err.fileno()


class _Handed:
    """A descriptor among the arguments of a process; there it is a number again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self._descriptor),)


def _taken(handed: Any) -> int:
    return int(handed.detach())


def _as_program(argv: list[str], environment: dict[str, str], streams: list[int]) -> None:
    for own, given in enumerate(streams):
        os.dup2(given, own)
        os.close(given)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has closed the one of before
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
