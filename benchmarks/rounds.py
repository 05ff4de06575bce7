"""Rounds of turns over the systems, in as many waves as the memory of the machine asks for."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks import memory
from benchmarks.errors import Unavailable, WorkerFailed
from benchmarks.harness import WorkerGroup, available_memory, rotated
from benchmarks.settings import Settings

REFERENCE = "limit"


@dataclass
class Record:
    """What one system did in the recorded rounds of one wave."""

    facts: list[dict[str, Any]]  # by rank
    losses: list[float] = field(default_factory=list)  # mean over ranks, warm-up included, one a step
    round_seconds: list[float] = field(default_factory=list)  # seconds a step, slowest rank, one a round
    step_seconds: list[float] = field(default_factory=list)  # slowest rank, one a step
    resident: list[int | None] = field(default_factory=list)  # bytes, largest rank, one a round
    peak: list[int | None] = field(default_factory=list)
    loopback: list[float] = field(default_factory=list)  # bytes a step and rank, one a round
    sent: list[dict[str, float] | None] = field(default_factory=list)  # bytes a step of rank 0 by kind, one a round
    report: Any = None  # rank 0's last one

    def warmed_up(self, answers: list[dict[str, Any]]) -> None:
        self._add_losses(answers)

    def add(self, answers: list[dict[str, Any]], loopback: int | None) -> None:
        steps = len(answers[0]["seconds"])
        self._add_losses(answers)
        self.round_seconds.append(max(sum(a["seconds"]) for a in answers) / steps)
        self.step_seconds.extend(max(each) for each in zip(*(a["seconds"] for a in answers), strict=True))
        self.resident.append(_largest([a["resident"] for a in answers]))
        self.peak.append(_largest([a["peak"] for a in answers]))
        if loopback is not None:
            self.loopback.append(loopback / steps / len(answers))
        sent = answers[0]["sent"]
        self.sent.append(None if sent is None else {kind: count / steps for kind, count in sent.items()})
        self.report = answers[0]["report"]

    def _add_losses(self, answers: list[dict[str, Any]]) -> None:
        self.losses.extend(statistics.fmean(each) for each in zip(*(a["losses"] for a in answers), strict=True))


def _largest(values: list[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


@dataclass
class Wave:
    """Systems that were in memory together, each with its record, and the reference that ran beside them."""

    reference: Record
    systems: dict[str, Record]


@dataclass
class Outcome:
    waves: list[Wave] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # not installed
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How long and with how much memory: `need` is what one more system may take, `reserve` stays free (bytes)."""

    rounds: int
    steps: int  # a turn
    warmup: int
    need: int
    reserve: int


_PROCESS_BYTES = 400 << 20  # interpreter, torch, the libraries of a system
_BYTES_PER_PARAMETER = 36  # no system seen so far takes more


def training_need(settings: Settings) -> int:
    """Bytes that one system's processes take while they train, at most."""
    return settings.nproc * (_PROCESS_BYTES + _BYTES_PER_PARAMETER * settings.parameters)


def training_starter(settings: Settings, deepspeed_python: str, timeout: float) -> Callable[[str], WorkerGroup]:
    """What makes the processes of a system that trains; DeepSpeed's have an interpreter of their own."""

    def start(name: str) -> WorkerGroup:
        python = deepspeed_python if name.startswith("deepspeed") else sys.executable
        return WorkerGroup(
            name, "benchmarks.training:TrainingJob", {"system": name, "settings": settings.to_json()},
            python=python, world=settings.nproc, threads=settings.threads, timeout=timeout,
        )  # fmt: skip

    return start


class Rounds:
    """Runs `systems` beside the reference. `start` makes the processes of a system, `say` shows a line of progress."""

    def __init__(self, plan: Plan, start: Callable[[str], WorkerGroup], say: Callable[[str], None]):
        self.plan = plan
        self._start = start
        self._say = say

    def run(self, systems: list[str]) -> Outcome:
        outcome = Outcome()
        pending = list(systems)
        with self._start(REFERENCE) as reference:
            warm = reference.ask({"steps": self.plan.warmup})
            while pending or not outcome.waves:
                groups, records = self._fill(pending, outcome)
                beside = Record(reference.facts)
                if not outcome.waves:
                    beside.warmed_up(warm)
                try:
                    self._wave(len(outcome.waves) + 1, reference, beside, groups, records, outcome)
                finally:
                    for group in groups.values():
                        group.close()
                outcome.waves.append(Wave(beside, records))
        return outcome

    def _fill(self, pending: list[str], outcome: Outcome) -> tuple[dict[str, WorkerGroup], dict[str, Record]]:
        """Starts systems from the front of `pending` while memory lasts; at least one."""
        groups: dict[str, WorkerGroup] = {}
        records: dict[str, Record] = {}
        while pending:
            free = available_memory()
            if groups and free is not None and free < self.plan.need + self.plan.reserve:
                break
            name = pending.pop(0)
            self._say(f"starting {name}")
            try:
                group = self._start(name)
            except Unavailable as reason:
                outcome.skipped[name] = str(reason)
                continue
            except WorkerFailed as error:
                outcome.failed[name] = str(error)
                continue
            groups[name], records[name] = group, Record(group.facts)
            answers = self._ask(name, groups, records, outcome, self.plan.warmup)
            if answers is not None:
                records[name].warmed_up(answers)
        return groups, records

    def _wave(
        self,
        number: int,
        reference: WorkerGroup,
        beside: Record,
        groups: dict[str, WorkerGroup],
        records: dict[str, Record],
        outcome: Outcome,
    ) -> None:
        self._say(f"wave {number}: {', '.join([REFERENCE, *groups])}")
        for turn in range(self.plan.rounds):
            for name in rotated([REFERENCE, *groups], turn):
                if name != REFERENCE and name not in groups:
                    continue  # it failed in this round
                before = memory.sent_over_loopback()
                if name == REFERENCE:
                    answers: list[dict[str, Any]] | None = reference.ask({"steps": self.plan.steps})
                    record = beside
                else:
                    record = records[name]
                    answers = self._ask(name, groups, records, outcome, self.plan.steps)
                if answers is not None:
                    after = memory.sent_over_loopback()
                    record.add(answers, None if before is None or after is None else after - before)
            self._say(f"wave {number}: round {turn + 1} of {self.plan.rounds}")

    def _ask(
        self, name: str, groups: dict[str, WorkerGroup], records: dict[str, Record], outcome: Outcome, steps: int
    ) -> list[dict[str, Any]] | None:
        """The answers of `name`; None, and the system is out, when it failed."""
        try:
            return groups[name].ask({"steps": steps})
        except WorkerFailed as error:
            outcome.failed[name] = str(error)
            groups.pop(name).close()
            records.pop(name)
            return None
