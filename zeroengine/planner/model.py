"""The model of a plan: built without values from a Hugging Face configuration, a folder, or a factory in Python."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroengine.errors import ConfigError, ModelError, ZeroEngineError


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: `make(**options)` builds it on the device in force. `options`: names of
    those that it takes; with `num_stages` and `stage_rank` it returns a `PipelineModule`. `inputs(batch, sequence)` makes the
    arguments of its forward."""

    name: str
    make: Callable[..., nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    options: frozenset[str] = frozenset()
    config: Any = None
    fake: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    @property
    def takes_stages(self) -> bool:
        return {"num_stages", "stage_rank"} <= self.options

    def build(self, **options: Any) -> nn.Module:
        """The model without memory for its values: fake tensors of the CPU, in training mode. Raises `ModelError`
        where it cannot be made."""
        with self.fake:
            model = self._made(options)
        if not isinstance(model, nn.Module):
            raise ModelError(f"{self.name} made a {type(model).__name__}; a plan needs an nn.Module")
        return model.train()

    def on_meta(self, **options: Any) -> nn.Module:
        """The model on the meta device. Raises `ModelError` where it cannot be made."""
        with torch.device("meta"):
            return self._made(options).train()

    def _made(self, options: dict[str, Any]) -> nn.Module:
        try:
            return self.make(**options)
        except ZeroEngineError:
            raise
        except Exception as error:  # a constructor may raise anything
            raise ModelError(f"{self.name} makes no model: {type(error).__name__}: {error}") from error

    def sequence(self) -> int | None:
        """The longest sequence that the configuration names."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        for name in ("max_position_embeddings", "n_positions"):
            if isinstance(getattr(text, name, None), int):
                return int(getattr(text, name))
        return None


def find_model(text: str, overrides: dict[str, Any] | None = None) -> ModelSource:
    """`text`: "python:package.module:factory", a folder with config.json, a path of one, or a model type of transformers
    ("gpt2") with `overrides` of its configuration's attributes. Nothing is downloaded, no weights are read.

    A factory is called without arguments, or with num_stages= and stage_rank= where it takes them and returns a
    `PipelineModule`; beside it the module may have `plan_inputs(batch, sequence)`, the arguments of forward.
    Raises `ConfigError` for what is not there.
    """
    if text.startswith("python:"):
        return _factory(text.removeprefix("python:"))
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.is_file():
            values = json.loads(path.read_text())
        else:
            values = {"model_type": text}
        return _transformers(text, {**values, **(overrides or {})})
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"--model {text}: {error}") from error


def _transformers(name: str, values: dict[str, Any]) -> ModelSource:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f'--model {name}: needs transformers (pip install "zeroengine[hf]"): {error}') from error
    values = dict(values)
    kind = values.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"--model {name}: neither a folder with config.json, nor a model type of transformers, nor python:module:factory"
            if kind == name else f"--model {name}: transformers knows no model_type {kind!r}"
        )  # fmt: skip
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:  # each model type checks its attributes in its own way
        raise ConfigError(f"--model {name}: transformers takes no such configuration: {type(error).__name__}: {error}") from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"--model {name}: transformers has no causal language model of type {kind}; give a factory (python:module:factory)"
        )

    def make() -> nn.Module:
        from transformers.initialization import no_init_weights

        with no_init_weights():
            made: nn.Module = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))  # the engine changes a model's own
        return made

    return ModelSource(name, make, token_inputs, config=config)


def token_inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    """Token ids and labels, int64 [batch, sequence]."""
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def _factory(text: str) -> ModelSource:
    module_name, _, name = text.partition(":")
    try:
        module = importlib.import_module(module_name)
        factory = getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--model python:{text}: {error}; write python:package.module:factory") from error
    return from_factory(factory, getattr(module, "plan_inputs", token_inputs), f"python:{text}")


def from_factory(
    factory: Callable[..., nn.Module], inputs: Callable[[int, int], dict[str, Tensor]] = token_inputs, name: str = ""
) -> ModelSource:
    """A source that calls `factory`; see `find_model`."""
    return ModelSource(name or getattr(factory, "__name__", "model"), factory, inputs, frozenset(inspect.signature(factory).parameters))
