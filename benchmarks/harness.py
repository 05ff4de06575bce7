"""Groups of processes that take turns, so that whatever slows the machine slows all of them alike.

The processes of every group stay alive, and sleep in a read while another group has its turn. The parent imports no
torch.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.errors import Unavailable, WorkerFailed

_ROOT = Path(__file__).resolve().parent.parent
_LOG_LINES = 25


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _environment(rank: int, world: int, port: int, threads: int) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }


class WorkerGroup:
    """`world` processes of `benchmarks.worker` with one job. A context manager: leaving it ends them.

    Raises `Unavailable` when the job says that its subject is not installed, `WorkerFailed` for every other failure.
    """

    def __init__(self, name: str, job: str, arguments: dict[str, Any], *, python: str, world: int, threads: int, timeout: float):
        self.name = name
        self.timeout = timeout
        self._logs = [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115 (closed with the group)
        port = self._port = free_port()
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(world):
                self._processes.append(self._spawn(python, _environment(rank, world, port, threads), self._logs[rank]))
            self.facts = self.ask({"job": job, "arguments": arguments})
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _spawn(python: str, environment: dict[str, str], log: Any) -> subprocess.Popen[str]:
        command = [python, "-m", "benchmarks.worker"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment, text=True)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Sends `request` to every process and waits for every answer; answers in rank order."""
        line = json.dumps(request) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it died; its missing answer says so below
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [r for r in range(len(self._processes)) if r not in answers]
                    raise self._failure(silent[0], f"no answer within {self.timeout:g} s from ranks {silent}")
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    answers[key.data] = self._accept(key.data)
        return [answers[rank] for rank in range(len(self._processes))]

    def _accept(self, rank: int) -> dict[str, Any]:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise self._failure(rank, f"rank {rank} ended (exit code {self._processes[rank].wait()})")
        answer = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "error" in answer:
            raise WorkerFailed(f"{self.name}: rank {rank} raised\n{answer['error']}")
        ok: dict[str, Any] = answer["ok"]
        return ok

    def _failure(self, rank: int, what: str) -> WorkerFailed:
        log = self._logs[rank]
        log.seek(0)
        tail = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        return WorkerFailed("\n".join([f"{self.name}: {what}; the end of its log:", *tail]))

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except BrokenPipeError:
                    pass
        for process in self._processes:
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()
        for log in self._logs:
            log.close()
        self._logs.clear()
        # DeepSpeed's memory between processes outlives them, 66 MiB each, and would be missed by the systems after it
        for left in Path("/dev/shm").glob(f"deepspeed_*_{self._port}_*"):
            left.unlink(missing_ok=True)


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """`items` starting at another one each round, so that none always follows the same neighbour first or last."""
    if not items:
        return []
    by %= len(items)
    return [*items[by:], *items[:by]]


def steps_in_turns(
    names: Sequence[str], start: Callable[[str], WorkerGroup], rounds: int, steps: int,
    figures: Callable[[WorkerGroup, list[list[dict[str, Any]]]], dict[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:  # fmt: skip
    """Figures by system, and why others have none. `start` makes the group of a system; each takes `steps` steps in every round,
    and two before the first, which do not count. `figures` is given a group and its answers by round and rank."""
    groups: dict[str, WorkerGroup] = {}
    missing: dict[str, str] = {}
    try:
        for name in names:
            try:
                groups[name] = start(name)
                groups[name].ask({"steps": 2})
            except (Unavailable, WorkerFailed) as error:
                missing[name] = str(error)
                if name in groups:
                    groups.pop(name).close()
        answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in groups}
        for turn in range(rounds):
            for name in rotated(list(groups), turn):
                answers[name].append(groups[name].ask({"steps": steps}))
            say(f"round {turn + 1} of {rounds}")
        return {name: figures(groups[name], each) for name, each in answers.items()}, missing
    finally:
        for group in groups.values():
            group.close()


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of values[i] / reference[i]: each round is compared with itself, drift cancels."""
    if not values or len(values) != len(reference):
        raise ValueError(f"{len(values)} rounds cannot be paired with {len(reference)}")
    ratios = [v / r for v, r in zip(values, reference, strict=True)]
    low, high = quartiles(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    cut = statistics.quantiles(values, n=4, method="inclusive")
    return cut[0], cut[2]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned plain text: the first column to the left, numbers to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def render(line: Sequence[str]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join([line[0].ljust(widths[0]), *numbers]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([render(lines[0]), rule, *(render(line) for line in lines[1:])])


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def available_memory() -> int | None:
    """Bytes the kernel says can be taken without swapping; None where there is no /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def machine() -> dict[str, Any]:
    """Where figures come from, for whoever reads them later."""
    model = None
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    load = os.getloadavg()[0]
    return {"cpu": model, "cores": os.cpu_count(), "load_before": load, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def idle_warning(facts: dict[str, Any]) -> str | None:
    """One line when others use the machine: ratios still hold roughly, times do not."""
    if facts["load_before"] < 0.5:
        return None
    return f"note: the machine was not idle at the start (load {facts['load_before']:.1f}); figures are provisional"


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def say(line: str) -> None:
    """Progress, to standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def write(line: str) -> None:
    """Results, to standard output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
