"""Workers of benchmarks as forks of a process that has imported the engine already (tests/forks.py); two files start real ones."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from benchmarks.harness import WorkerGroup
from tests.forks import Program, start_program

REAL = ("test_harness", "test_adam")


class _Worker:
    """What `WorkerGroup` uses of subprocess.Popen."""

    def __init__(self, program: Program, requests: int, answers: int) -> None:
        self._program = program
        self.stdin, self.stdout = os.fdopen(requests, "w"), os.fdopen(answers)

    def wait(self, timeout: float = 60.0) -> int:
        self._program.wait(timeout)
        return self._program.code()


def _forked(python: str, environment: dict[str, str], log: Any) -> Any:
    if python != sys.executable:
        return _spawned(python, environment, log)
    its_input, requests = os.pipe()
    answers, its_output = os.pipe()
    program = start_program(["-m", "benchmarks.worker"], environment, (its_input, its_output, log.fileno()))
    os.close(its_input)
    os.close(its_output)
    return _Worker(program, requests, answers)


_spawned = WorkerGroup._spawn


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__.rpartition(".")[2] not in REAL:
        monkeypatch.setattr(WorkerGroup, "_spawn", staticmethod(_forked))
