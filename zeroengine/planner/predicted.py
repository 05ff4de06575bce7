"""A plan as predictions that a run carries in its configuration (`monitor.predicted`) and shows beside what it measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroengine.planner.plan import Plan

_OTHERS = 3  # layouts with less memory, for a run that is out of it


def predictions(plan: Plan, fitting: Sequence[Plan] = ()) -> dict[str, Any]:
    """`time`: seconds of a step by phase. `memory`: the most bytes of the fullest rank by kind, of those that come and go in a step.
    `traffic`: bytes that a rank sends in a step by "stream.operation", for the pipeline ranks that were looked at. `others`: layouts of
    `fitting` that need less memory, the fastest first."""
    time, memory = plan.time, plan.fullest.memory
    idle = time.bubble * time.pipeline
    less = [p for p in fitting if p.fullest.memory.total < memory.total][:_OTHERS]
    return {
        "layout": plan.layout.show(),
        "time": {
            "compute": max(time.pipeline - idle - time.inside, 0.0), "exposed communication": time.inside + time.exposed,
            "optimizer": time.update, "idle": idle,
        },
        "memory": {"activations": memory.activations, "working": memory.working},
        "traffic": {str(rank.place): rank.sent for rank in plan.ranks},
        "others": [{"layout": p.layout.show(), "memory": p.fullest.memory.total, "seconds": p.time.total} for p in less],
    }  # fmt: skip


def with_predictions(config: dict[str, Any], plan: Plan, fitting: Sequence[Plan], folder: str) -> dict[str, Any]:
    """`config` of a plan, whose run is recorded in `folder` (unless it names one) beside what the plan says."""
    monitor = {"run_dir": folder, **config.get("monitor", {}), "predicted": predictions(plan, fitting)}
    monitor.pop("plan", None)  # of another plan
    return {**config, "monitor": monitor}
