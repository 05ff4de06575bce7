"""The torch optimizer of a run: from the config's `optimizer` section, or the user's own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import log_once
from zeroengine.optim.update import is_elementwise

ParamGroups = list[dict[str, Any]]
OptimizerFactory = Callable[[ParamGroups], torch.optim.Optimizer]
"""Makes an optimizer over groups. An attribute `elementwise` says whether flat pieces are right for it, if known."""

# Keys of DeepSpeed's optimizers that choose an implementation, not a result.
_IMPLEMENTATION = frozenset({"torch_adam", "set_grad_none", "fused", "foreach", "capturable"})


def param_groups(module: nn.Module, given: Iterable[Any] | None) -> ParamGroups:
    """Groups from `model_parameters` (parameters, (name, parameter) pairs or group dicts), or one of all trainable ones."""
    if given is None:
        entries: list[Any] = [p for p in module.parameters() if p.requires_grad]
    elif isinstance(given, dict):
        entries = [given]
    else:
        entries = list(given)
    if entries and all(isinstance(e, dict) for e in entries):
        groups = [dict(e) for e in entries]
        for i, group in enumerate(groups):
            if "params" not in group:
                raise ConfigError(f"parameter group {i} has no 'params'; its keys are {sorted(group)}")
            params = group["params"]
            group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    else:
        params = [e[1] if isinstance(e, tuple) else e for e in entries]
        groups = [{"params": params}]
    for i, group in enumerate(groups):
        for p in group["params"]:
            if not isinstance(p, torch.Tensor):
                raise ConfigError(
                    f"parameter group {i} holds a {type(p).__name__}; it must hold parameters of the model"
                )
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return groups


def check_trainable(module: nn.Module, groups: ParamGroups) -> None:
    total = sum(1 for _ in module.parameters())
    if not total:
        raise ModelError("the model has no parameters; zeroengine.initialize needs an nn.Module with parameters")
    if not any(p.requires_grad for p in module.parameters()):
        raise ModelError(
            f"all {total} parameters of the model are frozen (requires_grad=False), so there is nothing to train; unfreeze "
            "some, or leave the optimizer out of the config for an evaluation-only engine"
        )
    if not any(g["params"] for g in groups):
        raise ModelError(
            "model_parameters holds no trainable parameter of the model; pass model.parameters() or leave it out"
        )


def optimizer_class(name: str, params: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
    """The class that config `optimizer.type` names, case and underscores aside."""
    wanted = name.replace("_", "").lower()
    classes = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }
    classes.pop("optimizer", None)
    if wanted in ("adam", "fusedadam", "cpuadam", "deepspeedcpuadam"):
        # torch's meaning: "Adam" adds weight decay to the gradient, unless the config says otherwise.
        wanted = "adamw" if params.get("adam_w_mode") is True else "adam"
        if wanted == "adam" and params.get("weight_decay") and "adam_w_mode" not in params:
            log_once(
                'optimizer.type "Adam" with weight_decay is Adam with L2 regularisation, as in torch; DeepSpeed takes AdamW here '
                'unless adam_w_mode is false. Write "AdamW" (or "adam_w_mode": true) for decoupled weight decay'
            )
    elif wanted == "adamw" and params.get("adam_w_mode") is False:
        wanted = "adam"
    if wanted not in classes:
        near = difflib.get_close_matches(wanted, classes, n=1)
        hint = f"; did you mean '{classes[near[0]].__name__}'?" if near else ""
        raise ConfigError(
            f"optimizer.type '{name}' is not known{hint} Any class of torch.optim can be named, or pass your own"
        )
    return classes[wanted]


def optimizer_factory(name: str, params: Mapping[str, Any]) -> OptimizerFactory:
    """Checks `optimizer.params` against the class and returns what builds it over groups."""
    cls = optimizer_class(name, params)
    signature = inspect.signature(cls.__init__).parameters
    accepted = {n for n in signature if n not in ("self", "params", "args", "kwargs")}
    kwargs: dict[str, Any] = {}
    for key, value in params.items():
        if key in ("adam_w_mode", *_IMPLEMENTATION):
            continue
        if key == "bias_correction" and value is True:
            continue
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(
                f"optimizer.params.{key} is not a parameter of {cls.__name__}{hint}; it takes {sorted(accepted)}"
            )
        kwargs[key] = tuple(value) if isinstance(value, list) else value
    if "lr" in accepted and "lr" not in kwargs and signature["lr"].default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer.params.lr is missing; {cls.__name__} has no default learning rate")
    if "fused" in accepted and cls is not torch.optim.SGD:
        # One pass over the memory. Not SGD's: it rounds an element differently by its place in memory, and the stages
        # would no longer agree to the last bit.
        kwargs["fused"] = True

    return ClassFactory(cls, kwargs)


class ClassFactory:
    """Builds an optimizer of a known class."""

    def __init__(self, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> None:
        self.elementwise = is_elementwise(cls)
        self._cls = cls
        self._kwargs = kwargs

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        kwargs = dict(self._kwargs)
        if any(p.is_complex() for group in groups for p in group["params"]):
            kwargs.pop("fused", None)  # torch has none for complex numbers, and says so only in step
        try:
            return self._cls(groups, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if "fused" not in str(error) or "fused" not in kwargs:
                raise ConfigError(f"optimizer.params do not fit {self._cls.__name__}: {error}") from error
        kwargs.pop("fused")  # not for these options or this dtype; the result is the same
        return self._cls(groups, **kwargs)
