"""`deepspeed.checkpointing`: recomputation of activations under DeepSpeed's names, done by torch.utils.checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeroengine.errors import ConfigError
from zeroengine.offload.inputs import inputs_on_host, recomputed

_MEMORY = ("partition_activations", "contiguous_checkpointing")


class _Settings:
    """Whether `configure` was called, which scripts ask, and whether saved inputs wait on the host."""

    def __init__(self) -> None:
        self.configured = self.on_host = False


_settings = _Settings()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function(*args)` without keeping its activations, and again in backward, with the same random numbers. `args` wait
    for that on the host if `configure` or the engine's configuration says so."""
    with inputs_on_host(_settings.on_host):
        return recomputed(function, *args)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """`CheckpointFunction.apply(function, outputs, *args)`, the form below `checkpoint`."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> None:
        result = checkpoint(function, *args)
        all_outputs += result if isinstance(result, tuple) else [result]


def configure(
    mpu_: Any = None, deepspeed_config: Any = None, partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None, num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None, profile: bool | None = None,
) -> None:  # fmt: skip
    """`checkpoint_in_cpu` keeps saved inputs on the host; the other ways of keeping them are refused. What a configuration says
    of them counts in the engine that it is given to."""
    asked = dict(zip(_MEMORY, (partition_activations, contiguous_checkpointing), strict=True))
    for name, value in asked.items():
        if value:
            raise ConfigError(f"deepspeed.checkpointing.configure({name}=True): saved inputs stay where they are made; leave it out")
    _settings.configured = True
    if checkpoint_in_cpu is not None:
        _settings.on_host = checkpoint_in_cpu


def is_configured() -> bool:
    return _settings.configured


def reset() -> None:
    """Nothing is kept between steps."""


class RandomStates:
    """`get_cuda_rng_tracker()`: named random states, one of which is current inside `fork`."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        self._states.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        if name in self._states:
            raise ValueError(f"a random state {name!r} exists already")
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self._states[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self._states:
            raise ValueError(f"no random state {name!r}; add it with model_parallel_cuda_manual_seed(seed)")
        before = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(before)


_tracker = RandomStates()


def get_cuda_rng_tracker() -> RandomStates:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds torch's generator, and a second state for `fork`."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)
