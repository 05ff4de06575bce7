"""The profile of a model's modules, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroengine.monitor.words import aligned, in_counts, in_seconds


@dataclass(frozen=True)
class ModuleFigures:
    """One module with all that is in it: whole parameters, operations of a step on this rank, seconds of forward in a step."""

    path: str
    kind: str
    parameters: int
    forward: int
    backward: int
    seconds: float

    @property
    def depth(self) -> int:
        return self.path.count(".") + 1 if self.path else 0

    @property
    def macs(self) -> int:
        return self.forward // 2


@dataclass(frozen=True)
class Profile:
    """`modules` in the order of the model, which comes first. `phases`: seconds of the timed step, which took `wall`. `peak`:
    operations a second, `measured` or given."""

    step: int
    modules: Sequence[ModuleFigures]
    phases: Mapping[str, float]
    wall: float
    peak: float
    measured: bool

    @property
    def total(self) -> ModuleFigures:
        return self.modules[0]

    @property
    def hfu(self) -> float:
        """Share of the peak, with all operations that ran."""
        return (self.total.forward + self.total.backward) / (self.wall * self.peak) if self.wall else 0.0

    @property
    def mfu(self) -> float:
        """Share of the peak without recomputation: a backward counts twice the forward at most."""
        useful = self.total.forward + min(self.total.backward, 2 * self.total.forward)
        return useful / (self.wall * self.peak) if self.wall else 0.0


def show(profile: Profile, depth: int, top: int, detailed: bool) -> str:
    """Totals, the `top` kinds of modules by depth down to `depth` (-1: the deepest), and with `detailed` every module."""
    total, phases = profile.total, profile.phases
    rows = [
        ["parameters", in_counts(total.parameters)],
        ["forward FLOPs", in_counts(total.forward)],
        ["forward MACs", in_counts(total.macs)],
        ["backward FLOPs", in_counts(total.backward)],
        *([f"{name} latency", in_seconds(seconds)] for name, seconds in phases.items()),
        ["step", in_seconds(profile.wall)],
        ["FLOPS", f"{in_counts((total.forward + total.backward) / profile.wall)}/s" if profile.wall else "-"],
        ["peak", f"{in_counts(profile.peak)}/s ({'a matrix product, measured' if profile.measured else 'flops_profiler.peak_tflops'})"],
        ["MFU", f"{100 * profile.mfu:.1f} %"],
        ["HFU (with recomputation)", f"{100 * profile.hfu:.1f} %"],
    ]
    parts = [f"profile of step {profile.step}, one rank", aligned([["quantity", "value"], *rows]), _by_depth(profile, depth, top)]
    if detailed:
        parts.append(_tree(profile))
    return "\n\n".join(parts)


def _by_depth(profile: Profile, depth: int, top: int) -> str:
    deepest = max(m.depth for m in profile.modules)
    table = [["depth", "module", "parameters", "forward MACs", "forward latency"]]
    for level in range((deepest if depth < 0 else min(depth, deepest)) + 1):
        kinds: dict[str, list[ModuleFigures]] = {}
        for m in profile.modules:
            if m.depth == level:
                kinds.setdefault(m.kind, []).append(m)
        ranked = sorted(kinds.items(), key=lambda item: (-sum(m.forward for m in item[1]), -sum(m.parameters for m in item[1])))
        for kind, members in ranked[:top]:
            table.append([
                str(level), f"{kind} ({len(members)})", in_counts(sum(m.parameters for m in members)),
                in_counts(sum(m.macs for m in members)), in_seconds(sum(m.seconds for m in members)),
            ])  # fmt: skip
    return aligned(table)


def _tree(profile: Profile) -> str:
    total = profile.total
    table = [["module", "kind", "parameters", "of all", "forward FLOPs", "of all", "backward FLOPs", "forward latency"]]
    for m in profile.modules:
        table.append([
            "  " * m.depth + (m.path.rpartition(".")[2] or "model"), m.kind, in_counts(m.parameters),
            _share(m.parameters, total.parameters), in_counts(m.forward), _share(m.forward, total.forward), in_counts(m.backward),
            in_seconds(m.seconds),
        ])  # fmt: skip
    return aligned(table)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
