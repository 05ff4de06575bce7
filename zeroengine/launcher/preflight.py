"""`zerorun check`: looks at the hosts of a job before it runs. A table, and what is wrong with which host."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeroengine.errors import ZeroEngineError
from zeroengine.launcher import network
from zeroengine.launcher.crew import Crew
from zeroengine.launcher.link import Message
from zeroengine.launcher.member import Member, State
from zeroengine.launcher.options import build_check_parser, parse_hosts
from zeroengine.launcher.outputs import Outputs
from zeroengine.launcher.plan import Job
from zeroengine.launcher.reach import address_of

_CLOCK = 1.0  # seconds by which clocks may differ
_PATIENCE = 20.0  # for the answer to one question
_SECONDS, _BYTES = 0.3, 1 << 28  # of one measurement between two hosts


@dataclass
class Findings:
    """All that came to light. `wrong` has a line for each thing that would stop or spoil a job."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    rates: dict[tuple[int, int], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def pairings(count: int) -> Iterable[list[tuple[int, int]]]:
    """Every pair of `count` hosts once, in rounds in which each host is in one pair at most."""
    ring = list(range(count + count % 2))
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < count]
        ring = [ring[0], ring[-1], *ring[1:-1]]


class Check:
    """Asks the hosts of a job."""

    def __init__(self, job: Job, folder: str) -> None:
        self._job, self._folder = job, folder
        self._outputs = Outputs(job.plan, None)
        self._crew = Crew(job, secrets.token_hex(16), self._outputs)
        self._answers: dict[int, tuple[Message, float]] = {}

    def run(self) -> Findings:
        found = Findings()
        try:
            self._crew.start()
            self._turn_until(self._all_known, self._job.connect_timeout)
            ready = [m for m in self._crew.members if m.state is State.READY]
            self._look(found, ready)
            self._measure(found, ready)
            self._crew.end(0, 15)
            self._turn_until(self._crew.all_gone, 5.0)
        finally:
            self._crew.close()
            self._outputs.close()
        return found

    def _all_known(self) -> bool:
        return not any(m.state in (State.WAITING, State.GREETED) for m in self._crew.members)

    def _turn_until(self, over: Callable[[], bool], patience: float) -> None:
        end = time.monotonic() + patience
        while not over() and time.monotonic() < end:
            with selectors.DefaultSelector() as selector:
                self._crew.register(selector)
                ready = selector.select(0.1)
            for key, _ in ready:
                if not isinstance(key.data, Member):
                    key.data()
                    continue
                frames = key.data.read()
                for frame in frames or ():
                    if isinstance(frame, dict) and not self._crew.take(key.data, frame):
                        self._answers[key.data.index] = frame, time.time()
                if frames is None:
                    self._crew.ended(key.data, "its node ended")
            self._crew.beat(time.monotonic())

    def _ask(self, questions: dict[int, Message]) -> dict[int, Message]:
        """Questions by index of the host; what is not answered has an `error`."""
        self._answers.clear()
        asked = time.time()
        for index, question in questions.items():
            self._crew.members[index].send({"do": "probe", **question})
        self._turn_until(lambda: all(i in self._answers or not self._crew.members[i].there for i in questions), _PATIENCE)
        answers: dict[int, Message] = {}
        for index in questions:
            message, when = self._answers.get(index, ({"error": self._crew.members[index].why or "no answer"}, asked))
            answers[index] = {**message, "middle": (asked + when) / 2, "spread": (when - asked) / 2}
        return answers

    def _look(self, found: Findings, ready: Sequence[Member]) -> None:
        facts = self._ask({m.index: {"ask": "facts", "port": self._job.plan.master_port} for m in ready})
        shared = self._shared(ready)
        first = next((facts[m.index] for m in ready if "error" not in facts[m.index]), None)
        for member in self._crew.members:
            name = member.host.name
            if member.index not in facts or "error" in facts[member.index]:
                why = facts[member.index]["error"] if member.index in facts else member.why or "it did not answer"
                found.rows.append((name, "no", *("-" * 5)))
                found.wrong.append(f"{name}: not reached: {why}")
                continue
            fact = facts[member.index]
            off = fact["clock"] - fact["middle"]
            clock_wrong = abs(off) - fact["spread"] > _CLOCK
            port = "-" if not self._job.plan.master_port else "free" if fact["port"] is None else "taken"
            versions = fact["versions"]
            row = (name, "yes", fact["python"], versions.get("torch", "none"), f"{off:+.2f} s", port, shared[member.index] or "yes")
            found.rows.append(row)
            found.wrong += [f"{name}: {text}" for text in _differences(fact, first)]
            if clock_wrong:
                found.wrong.append(f"{name}: its clock is {off:+.1f} s off; keep clocks together (chrony, NTP)")
            if port == "taken":
                found.wrong.append(f"{name}: port {self._job.plan.master_port} cannot be used: {fact['port']}")
            if shared[member.index]:
                found.wrong.append(f"{name}: the folder {self._folder} is not shared with {ready[0].host.name}: {shared[member.index]}")

    def _shared(self, ready: Sequence[Member]) -> dict[int, str]:
        """Why a host does not see what the first host writes to the folder; empty where it does."""
        if not ready:
            return {}
        text, path = secrets.token_hex(16), os.path.join(self._folder, f".zerorun-check-{secrets.token_hex(4)}")
        first = ready[0].index
        if error := self._ask({first: {"ask": "write", "path": path, "text": text}})[first].get("error"):
            return {m.index: str(error) for m in ready}
        read = self._ask({m.index: {"ask": "read", "path": path} for m in ready})
        self._ask({first: {"ask": "remove", "path": path}})
        return {index: str(a.get("error", "" if a.get("text") == text else "other contents")) for index, a in read.items()}

    def _measure(self, found: Findings, ready: Sequence[Member]) -> None:
        addresses = {m.index: self._address(m, ready) for m in ready}
        for pairs in pairings(len(ready)):
            both = [(ready[a], ready[b]) for a, b in pairs]
            ports = self._ask({b.index: {"ask": "listen", "address": addresses[b.index]} for _, b in both})
            questions: dict[int, Message] = {}
            for a, b in both:
                if "error" in ports[b.index]:
                    found.rates[a.index, b.index] = "none"
                    found.wrong.append(f"{b.host.name}: cannot listen on {addresses[b.index]}: {ports[b.index]['error']}")
                    continue
                where = {"address": addresses[b.index], "port": ports[b.index]["port"]}
                questions[a.index] = {"ask": "send", **where, "seconds": _SECONDS, "bytes": _BYTES}
            sent = self._ask(questions)
            for a, b in both:
                if a.index in sent and "error" in sent[a.index]:
                    found.rates[a.index, b.index] = "none"
                    way = f"{a.host.name} -> {b.host.name} ({addresses[b.index]})"
                    found.wrong.append(f"{way}: {sent[a.index]['error']}; open the ports between the hosts, or choose another --interface")
                elif a.index in sent:
                    found.rates[a.index, b.index] = f"{sent[a.index]['rate'] / 1e6:.0f}"

    def _address(self, member: Member, ready: Sequence[Member]) -> str:
        if member.remote:
            return address_of(member)
        others = [m for m in ready if m is not member]
        return (network.route(address_of(others[0])).source if others else None) or "127.0.0.1"


def _differences(fact: Message, first: Message | None) -> Iterable[str]:
    if first is None or fact is first:
        return
    if fact["python"].rpartition(".")[0] != first["python"].rpartition(".")[0]:
        yield f"Python {fact['python']}, {first['python']} on {first['host']}"
    for name in sorted({*fact["versions"], *first["versions"]}):
        here, there = fact["versions"].get(name, "none"), first["versions"].get(name, "none")
        if here != there:
            yield f"{name} {here}, {there} on {first['host']}"


def table(found: Findings, names: Sequence[str]) -> str:
    """The findings as text of aligned columns."""
    rows = [("host", "reached", "python", "torch", "clock", "port", "folder"), *found.rows]
    text = _aligned(rows)
    if found.rates:
        size = range(len(names))
        rates = [("MB/s", *names), *((names[a], *(found.rates.get((min(a, b), max(a, b)), "") for b in size)) for a in size)]
        text += "\n" + _aligned(rates)
    wrong = [f"wrong: {line}" for line in found.wrong]
    return text + "\n" + "\n".join(wrong or [f"{len(found.rows)} hosts, nothing wrong"]) + "\n"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def run(argv: Sequence[str]) -> int:
    """0 where nothing is wrong, 1 where something is, 2 for a wrong command line."""
    if any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(build_check_parser().format_help())
        return 0
    job, folder = parse_hosts(argv)
    if shutil.which(job.plan.python) is None:
        raise ZeroEngineError(f"no program {job.plan.python} here")
    found = Check(job, str(Path(folder).absolute())).run()
    sys.stdout.write(table(found, [host.name for host in job.hosts]))
    return 1 if found.wrong else 0
