"""`flops_profiler`: operations, parameters and times of every module, and how much of the device's peak a step reaches.

Operations are counted by torch's `FlopCounterMode` in one step, forward and backward, as they run on this rank; times are those of
the next step, which nothing slows. A multiply and an add are two operations and one MAC.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zeroengine.config.monitoring import FlopsProfilerSection
from zeroengine.logging import logger
from zeroengine.monitor.flops_text import ModuleFigures, Profile, show
from zeroengine.monitor.observer import Observer, Step, clock
from zeroengine.zero.hooks import ModuleHook, in_backward
from zeroengine.zero.tensor import whole_shape

_PRODUCT = 1024  # rows of the matrix product that stands for the peak
_TRIES = 5


def _attention(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


# torch counts attention on GPUs only.
_ON_CPU: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

Counts = dict[str, int]


class Counter:
    """Operations by module while it is open. `begin_backward` and `end_backward` part forward from backward."""

    def __init__(self, model: nn.Module) -> None:
        self._mode = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
        self._root = type(model).__name__
        self._mark: Counts = {}
        self.forward: Counts = {}
        self.backward: Counts = {}
        self._mode.__enter__()

    def begin_backward(self) -> None:
        self._add_to(self.forward)

    def end_backward(self) -> None:
        self._add_to(self.backward)

    def close(self) -> None:
        self._add_to(self.forward)
        self._mode.__exit__(None, None, None)

    def _add_to(self, counts: Counts) -> None:
        now = {name: sum(by_op.values()) for name, by_op in self._mode.get_flop_counts().items()}
        for name, value in now.items():
            path = "" if name == "Global" else self._path(name)
            if path is not None and value > self._mark.get(name, 0):
                counts[path] = counts.get(path, 0) + value - self._mark.get(name, 0)
        self._mark = now

    def _path(self, name: str) -> str | None:
        """Of a module in the model; the model itself is counted by the total."""
        root = self._root + "."
        return name[len(root) :] if name.startswith(root) else None


class Stopwatch:
    """Seconds in the forward of every module while it is open; a recomputation is not forward."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: dict[str, float] = {}
        self._waits = any(p.device.type != "cpu" for p in model.parameters())
        self._starts: dict[str, list[float]] = {}
        self._handles: list[Any] = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(ModuleHook(self._start(path))))
            self._handles.append(module.register_forward_hook(ModuleHook(self._stop(path)), always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _start(self, path: str) -> Callable[..., None]:
        return lambda *_: self._starts.setdefault(path, []).append(clock(self._waits))

    def _stop(self, path: str) -> Callable[..., None]:
        def stop(*_: Any) -> None:
            starts = self._starts.get(path)
            if starts:
                spent = clock(self._waits) - starts.pop()
                if not in_backward():
                    self.seconds[path] = self.seconds.get(path, 0.0) + spent

        return stop


class FlopsProfiler(Observer):
    """Counts in step `profile_step`, times the next one, and writes the profile on rank 0. `result` is kept on every rank."""

    measures = True

    def __init__(self, section: FlopsProfilerSection, model: nn.Module, rank: int, dtype: torch.dtype) -> None:
        self._section, self._model, self._rank, self._dtype = section, model, rank, dtype
        self._counter: Counter | None = None
        self._watch: Stopwatch | None = None
        self._counts: tuple[Counts, Counts] | None = None
        self._phases: dict[str, float] = {}
        self._began = self._last_end = 0.0
        self._ended = 0  # steps
        self.result: Profile | None = None

    def phase_begins(self, name: str, detail: str, now: float) -> None:
        counting, timing = self._ended == self._section.profile_step - 1, self._ended == self._section.profile_step
        self._began = now
        if counting and name == "step":
            self._end_counting()
        elif counting and self._counts is None and self._counter is None:
            self._counter = Counter(self._model)
        elif timing and self._watch is None and self.result is None:
            self._watch = Stopwatch(self._model)
        if name == "backward" and self._counter is not None:
            self._counter.begin_backward()

    def phase_ends(self, name: str, detail: str, now: float) -> None:
        if name == "backward" and self._counter is not None:
            self._counter.end_backward()
        if self._watch is not None:
            self._phases[name] = self._phases.get(name, 0.0) + now - self._began

    def step_ended(self, step: Step) -> None:
        self._ended += 1
        if self._watch is not None and self._counts is not None:
            watch, self._watch = self._watch, None
            watch.close()
            self.result = self._figures(step.ended - self._last_end, watch.seconds)
            if self._rank == 0:
                self._write(self.result)
        self._last_end = step.ended

    def close(self) -> None:
        self._end_counting()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _end_counting(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.close()
            self._counts = counter.forward, counter.backward

    def _figures(self, wall: float, seconds: Mapping[str, float]) -> Profile:
        forward, backward = self._counts or ({}, {})
        modules = []
        for path, module in self._model.named_modules():
            parameters = sum(whole_shape(p).numel() for p in module.parameters())
            modules.append(
                ModuleFigures(path, type(module).__name__, parameters, forward.get(path, 0), backward.get(path, 0), seconds.get(path, 0.0))
            )
        peak = self._section.peak_tflops
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        return Profile(
            self._section.profile_step, modules, dict(self._phases), wall, peak * 1e12 if peak else measured_peak(device, self._dtype),
            peak is None,
        )  # fmt: skip

    def _write(self, profile: Profile) -> None:
        section = self._section
        text = show(profile, section.module_depth, section.top_modules, section.detailed)
        if section.output_file is None:
            logger.info("%s", text)
        else:
            path = Path(section.output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the fastest of some products of square matrices."""
    a = torch.randn(_PRODUCT, _PRODUCT, device=device, dtype=dtype)
    best = float("inf")
    with torch.no_grad():
        for _ in range(_TRIES):
            start = time.perf_counter()
            a @ a
            if device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - start)
    return 2.0 * _PRODUCT**3 / best
