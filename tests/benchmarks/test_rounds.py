from __future__ import annotations

from typing import Any

import pytest

from benchmarks import rounds
from benchmarks.errors import Unavailable, WorkerFailed
from benchmarks.rounds import REFERENCE, Plan, Rounds


class _Machine:
    """Stands for processes and memory: each group holds one unit of memory while it is open."""

    def __init__(self, units: int, fails: str = "", absent: str = ""):
        self.units, self.fails, self.absent = units, fails, absent
        self.turns: list[str] = []
        self.open: set[str] = set()

    def start(self, name: str) -> Any:
        if name == self.absent:
            raise Unavailable("not here")
        return _Group(self, name)

    def available(self) -> int:
        return self.units - len(self.open)


class _Group:
    def __init__(self, machine: _Machine, name: str):
        self.machine, self.name = machine, name
        self.facts = [{"parameters": 1}, {"parameters": 1}]
        machine.open.add(name)

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        assert self.name in self.machine.open
        if self.name == self.machine.fails and self.machine.turns.count(self.name) == 2:
            raise WorkerFailed("broke")
        self.machine.turns.append(self.name)
        steps = request["steps"]
        return [
            {
                "seconds": [1.0 + rank] * steps, "losses": [2.0 + rank] * steps, "resident": 10 + rank, "shared": 0,
                "peak": None, "sent": {"total": 8 * steps}, "report": None,
            }
            for rank in range(2)
        ]  # fmt: skip

    def close(self) -> None:
        self.machine.open.discard(self.name)


def _run(machine: _Machine, systems: list[str], monkeypatch: pytest.MonkeyPatch) -> rounds.Outcome:
    monkeypatch.setattr(rounds, "available_memory", machine.available)
    plan = Plan(rounds=3, steps=2, warmup=1, need=1, reserve=0)
    return Rounds(plan, machine.start, lambda line: None).run(systems)


def test_turns_are_interleaved_and_paired_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(units=9)
    outcome = _run(machine, ["a", "b"], monkeypatch)
    assert machine.turns[3:] == [REFERENCE, "a", "b", "a", "b", REFERENCE, "b", REFERENCE, "a"]
    (wave,) = outcome.waves
    for record in [wave.reference, *wave.systems.values()]:
        assert record.round_seconds == [2.0, 2.0, 2.0]  # the slowest rank
        assert len(record.step_seconds) == 6
        assert record.losses == [2.5] * 7  # mean over ranks; warm-up counts
        assert record.resident == [11, 11, 11]  # the largest rank
        assert record.sent == [{"total": 8.0}] * 3  # a step
    assert not machine.open


def test_what_does_not_fit_runs_in_another_wave_beside_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(units=3)
    outcome = _run(machine, ["a", "b", "c"], monkeypatch)
    assert [list(wave.systems) for wave in outcome.waves] == [["a", "b"], ["c"]]
    assert all(len(wave.reference.round_seconds) == 3 for wave in outcome.waves)


def test_system_larger_than_memory_still_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _run(_Machine(units=0), ["a", "b"], monkeypatch)
    assert [list(wave.systems) for wave in outcome.waves] == [["a"], ["b"]]


def test_failing_and_missing_systems_do_not_disturb_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(units=9, fails="a", absent="b")
    outcome = _run(machine, ["a", "b", "c"], monkeypatch)
    assert outcome.failed == {"a": "broke"}
    assert outcome.skipped == {"b": "not here"}
    (wave,) = outcome.waves
    assert list(wave.systems) == ["c"]
    assert len(wave.systems["c"].round_seconds) == len(wave.reference.round_seconds) == 3
    assert not machine.open


def test_reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (wave,) = _run(_Machine(units=9), [], monkeypatch).waves
    assert len(wave.reference.round_seconds) == 3
