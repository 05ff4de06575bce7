"""Every legal layout of a job, the best first, and why the others are not among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zeroengine.planner.layouts import Choices
from zeroengine.planner.plan import Plan, Planner, Refused


@dataclass(frozen=True)
class Found:
    """`fitting` by time of a step; `too_large` by the memory that they need; `refused` by the engine."""

    fitting: tuple[Plan, ...]
    too_large: tuple[Plan, ...]
    refused: tuple[Refused, ...]

    @property
    def tried(self) -> int:
        return len(self.fitting) + len(self.too_large) + len(self.refused)

    def reasons(self) -> list[tuple[str, int]]:
        """What the engine said to layouts that it refused, and to how many."""
        return Counter(r.why_not for r in self.refused).most_common()


def search(planner: Planner, choices: Choices, told: Callable[[int, int], None] = lambda done, total: None) -> Found:
    """Works out all layouts of `choices`; `told(done, total)` is called after each."""
    layouts = sorted(choices.layouts(planner.job), key=lambda layout: (*layout.cut, layout.micro))  # neighbours share what was built
    fitting, large, refused = [], [], []
    for i, layout in enumerate(layouts):
        made = planner.plan(layout)
        if isinstance(made, Refused):
            refused.append(made)
        elif made.why_not is not None:
            large.append(made)
        else:
            fitting.append(made)
        told(i + 1, len(layouts))
    return Found(rank_plans(fitting), tuple(sorted(large, key=lambda p: p.fullest.memory.total)), tuple(refused))


def rank_plans(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """By time of a step; of equal ones the one that needs less memory."""
    return tuple(sorted(plans, key=lambda p: (p.time.total, p.fullest.memory.total)))
