"""`python -m benchmarks.planner`: plans held against what the engine measures on this machine, for 12 configurations.

Memory at rest by kind and activations (the fullest rank), bytes of every collective (every rank), and the order of the
configurations by time of a step (Kendall's tau). Takes a few minutes a round on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import WorkerGroup, idle_warning, machine, rotated, say, table, write, write_json
from benchmarks.planner_worker import model_source
from zeroengine.arguments import positive
from zeroengine.planner.hardware import Hardware, find_hardware
from zeroengine.planner.layouts import Job, Layout
from zeroengine.planner.measure import measure
from zeroengine.planner.plan import Plan, Planner, Refused
from zeroengine.planner.time import by_dim

_KINDS = ("parameters", "gradients", "optimizer", "disk")
Answers = list[dict[str, Any]]  # of the ranks


@dataclass(frozen=True)
class Case:
    """One configuration. `batch` in sequences of a step."""

    name: str
    ranks: int
    batch: int
    layout: Layout
    model: str = "llama"


CASES = (
    Case("stage 0", 2, 4, Layout(dp_shard=2, stage=0, micro=2)),
    Case("stage 1, 4 micro-batches", 2, 16, Layout(dp_shard=2, stage=1, micro=2)),
    Case("stage 2, recomputed", 2, 16, Layout(dp_shard=2, stage=2, micro=8, recompute=True)),
    Case("stage 3", 2, 4, Layout(dp_shard=2, stage=3, micro=2)),
    Case("stage 3, state on a disk", 2, 2, Layout(dp_shard=2, stage=3, micro=1, offload="nvme")),
    Case("tp 2", 2, 4, Layout(tp=2, stage=0, micro=4)),
    Case("pp 2", 2, 16, Layout(pp=2, stage=1, micro=2)),
    Case("cp 2, ulysses", 2, 8, Layout(cp=2, stage=1, micro=8)),
    Case("cp 2, ring", 2, 2, Layout(cp=2, stage=2, micro=2, attention="ring")),
    Case("ep 2", 2, 16, Layout(dp_shard=2, ep=2, stage=1, micro=8), "mixtral"),
    Case("tp 2 x dp 2, stage 1", 4, 16, Layout(dp_shard=2, tp=2, stage=1, micro=8)),
    Case("pp 2 x dp 2, stage 2", 4, 32, Layout(pp=2, dp_shard=2, stage=2, micro=4)),
)


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau of two lists without ties (1938): concordant less discordant pairs, over all pairs."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    signs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in pairs]
    return sum((s > 0) - (s < 0) for s in signs) / max(len(pairs), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.planner", description=__doc__)
    add = parser.add_argument
    add("--layers", type=positive, default=4, help="blocks (default %(default)s)")
    add("--hidden", type=positive, default=256, help="width (default %(default)s)")
    add("--sequence", type=positive, default=128, help="tokens of a sequence (default %(default)s)")
    add("--steps", type=positive, default=7, help="timed steps of a turn (default %(default)s)")
    add("--rounds", type=positive, default=3, help="turns of each configuration, in new processes (default %(default)s)")
    add("--hardware", default=None, help="file of `zerorun plan --measure` (default: measured now, on 2 and on 4 ranks)")
    add("--cases", default=None, help="numbers of the configurations, from 1, with commas (default: all)")
    add("--folder", default="/tmp", help="where offloaded state lies (default %(default)s)")
    add("--timeout", type=float, default=300.0, help="seconds in which a configuration must start, or finish")
    add("--json", type=Path, help="write all figures here")
    return parser


def _model(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    return {"kind": case.model, "layers": args.layers, "hidden": args.hidden}


def _job(case: Case, hardware: Hardware, args: argparse.Namespace) -> Job:
    return Job(case.ranks, hardware.memory, args.sequence, case.batch, hardware, "fp32", nvme_path=args.folder)


def plan_case(case: Case, hardware: Hardware, args: argparse.Namespace) -> Plan:
    plan = Planner(model_source(**_model(case, args)), _job(case, hardware, args)).plan(case.layout)
    if isinstance(plan, Refused):
        raise ValueError(f"{case.name}: {plan.why_not}")
    return plan


def train_case(case: Case, hardware: Hardware, args: argparse.Namespace) -> Answers:
    """One turn of a configuration, in new processes."""
    config = {**case.layout.config(_job(case, hardware, args)), "steps_per_print": None}
    arguments = {
        "model": _model(case, args), "layout": asdict(case.layout), "config": config, "sequence": args.sequence, "micro": case.layout.micro
    }  # fmt: skip
    job_name = "benchmarks.planner_worker:PlanJob"
    with WorkerGroup(case.name, job_name, arguments, python=sys.executable, world=case.ranks, threads=1, timeout=args.timeout) as group:
        return group.ask({"steps": args.steps})


def in_rounds(cases: Sequence[Case], rounds: int, train: Callable[[Case], Answers]) -> dict[str, tuple[list[float], Answers]]:
    """By name of the configuration: seconds of a step of the slowest rank in each round, the median of its steps, and the answers of the
    last round. Every round begins with another one."""
    found: dict[str, tuple[list[float], Answers]] = {}
    for turn in range(rounds):
        for case in rotated(cases, turn):
            answers = train(case)
            times, _ = found.get(case.name, ([], []))
            step = statistics.median(max(each) for each in zip(*(a["seconds"] for a in answers), strict=True))
            found[case.name] = [*times, step], answers
            say(f"round {turn + 1} of {rounds}: {case.name}")
    return found


def compare(case: Case, plan: Plan, times: Sequence[float], answers: Answers) -> dict[str, Any]:
    """Figures side by side. Memory is that of the first rank of each pipeline rank; `times`: seconds of a step in each round."""
    worst, total = 0.0, (0.0, 0.0)
    memory = []
    sent_equal, differences = True, []
    for rank in plan.ranks:
        answer, kinds = answers[rank.rank], rank.memory.kinds()
        pairs = {k: (kinds[k], float(answer["memory"][k])) for k in _KINDS}
        pairs["activations"] = (kinds["activations"], float(answer["activations"]))
        mine = sum(p for p, _ in pairs.values()), sum(m for _, m in pairs.values())
        if abs(mine[0] / mine[1] - 1) >= worst:
            worst, total = abs(mine[0] / mine[1] - 1), mine
        memory.append({"rank": rank.rank, "kinds": pairs, "resident": answer["resident"]})
        counted = {n: s for n, s in answer["sent"].items() if by_dim({n: s})}
        names = sorted({*rank.sent, *counted})
        odd = [(n, rank.sent.get(n, 0.0), counted.get(n, 0)) for n in names if rank.sent.get(n, 0.0) != counted.get(n, 0)]
        sent_equal &= not odd
        differences += odd
    return {
        "name": case.name, "ranks": case.ranks, "layout": plan.layout.show(), "memory": memory, "memory_error": worst, "planned": total[0],
        "measured": total[1], "bytes": sum(sum(r.sent.values()) for r in plan.ranks),
        "bytes_equal": sent_equal, "differences": differences,
        "planned_seconds": plan.time.total, "seconds": statistics.median(times), "rounds": list(times),
    }  # fmt: skip


def show(found: list[dict[str, Any]]) -> str:
    rows = []
    for f in found:
        error, equal = f"{f['memory_error']:.2%}", "equal" if f["bytes_equal"] else "DIFFER"
        megabytes = (f"{f[name] / 1e6:.2f}" for name in ("planned", "measured"))
        times = (f"{1e3 * f[name]:.0f}" for name in ("planned_seconds", "seconds"))
        rows.append([f["name"], str(f["ranks"]), *megabytes, error, f"{f['bytes']:,.0f}", equal, *times])
    titles = ["configuration", "ranks", "planned MB", "measured MB", "error", "bytes planned", "bytes", "step ms planned", "measured"]
    text = table(titles, rows)
    tau = kendall([f["planned_seconds"] for f in found], [f["seconds"] for f in found])
    odd = [f"  {f['name']}: {n} planned {p:,.0f}, sent {s:,}" for f in found for n, p, s in f["differences"]]
    exact = sum(f["bytes_equal"] for f in found)
    worst = max(f["memory_error"] for f in found)
    text += f"\n\nmemory within {worst:.2%}; bytes equal in {exact} of {len(found)}; Kendall's tau of the step times {tau:.2f}"
    return "\n".join([text, *odd])


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    facts = machine()
    warning = idle_warning(facts)
    if warning:
        say(warning)
    chosen = CASES if args.cases is None else tuple(CASES[int(n) - 1] for n in args.cases.split(","))
    machines = {n: find_hardware(args.hardware) if args.hardware else measure(n, args.folder) for n in sorted({c.ranks for c in chosen})}
    plans = {case.name: plan_case(case, machines[case.ranks], args) for case in chosen}
    measured = in_rounds(chosen, args.rounds, lambda case: train_case(case, machines[case.ranks], args))
    found = [compare(case, plans[case.name], *measured[case.name]) for case in chosen]
    write(show(found) + "\n")
    if args.json is not None:
        write_json(args.json, {"machine": facts, "hardware": {n: asdict(m) for n, m in machines.items()}, "cases": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
