"""The torch optimizer of a run: from the config's `optimizer` section, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ConfigError, ModelError
from zeroengine.logging import log_once
from zeroengine.ops.adagrad import FusedAdagrad
from zeroengine.ops.adam import FusedAdam
from zeroengine.ops.lion import FusedLion
from zeroengine.ops.sgd import FusedSGD
from zeroengine.optim.kinds import check_usable
from zeroengine.optim.lamb import Lamb
from zeroengine.optim.muon import MuonWithAdamW, muon_options, split_groups
from zeroengine.wording import did_you_mean

ParamGroups = list[dict[str, Any]]
OptimizerFactory = Callable[[ParamGroups], torch.optim.Optimizer]
"""Makes an optimizer over parameter groups, see `parts.attach`."""

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
    if not (entries and all(isinstance(e, dict) for e in entries)):
        entries = [{"params": entries}]
    return named_groups(*entries)


def named_groups(*given: dict[str, Any]) -> ParamGroups:
    """Copies of group dicts whose `params` is a list of trainable parameters: one parameter and (name, parameter) pairs
    are taken, too. Raises `ConfigError` for anything else."""
    groups = [dict(g) for g in given]
    for i, group in enumerate(groups):
        if "params" not in group:
            raise ConfigError(f"parameter group {i} has no 'params'; its keys are {sorted(group)}")
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        group["params"] = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]
        group.pop("param_names", None)
        for p in group["params"]:
            if not isinstance(p, torch.Tensor):
                raise ConfigError(f"parameter group {i} holds a {type(p).__name__}; it must hold parameters of the model")
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
        raise ModelError("model_parameters holds no trainable parameter of the model; pass model.parameters() or leave it out")


_OURS: dict[str, type[torch.optim.Optimizer]] = {"Lion": FusedLion, "Lamb": Lamb, "Muon": MuonWithAdamW}
# Ours in place of torch's, where the options allow: one pass, with the same bits wherever a tensor is cut.
_FUSED: dict[type[torch.optim.Optimizer], tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    torch.optim.Adam: (FusedAdam, {"adam_w_mode": False}),
    torch.optim.AdamW: (FusedAdam, {"adam_w_mode": True}),
    torch.optim.Adagrad: (FusedAdagrad, {}),
    torch.optim.SGD: (FusedSGD, {}),
}


def optimizer_class(name: str, params: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
    """The class that config `optimizer.type` names. Raises `ConfigError` for those that no stage can serve."""
    if name == "Adam" and params.get("adam_w_mode") is True:
        name = "AdamW"
    elif name == "AdamW" and params.get("adam_w_mode") is False:
        name = "Adam"
    elif name == "Adam" and params.get("weight_decay") and "adam_w_mode" not in params:
        # torch's meaning: "Adam" adds weight decay to the gradient, unless the config says otherwise.
        log_once(
            'optimizer.type "Adam" with weight_decay is Adam with L2 regularisation, as in torch; DeepSpeed takes AdamW here '
            'unless adam_w_mode is false. Write "AdamW" (or "adam_w_mode": true) for decoupled weight decay'
        )
    cls: type[torch.optim.Optimizer] = _OURS.get(name) or getattr(torch.optim, name)
    check_usable(cls)
    return cls


def optimizer_factory(name: str, params: Mapping[str, Any], model: nn.Module) -> ClassFactory:
    """Checks `optimizer.params` against the class and returns what builds it over groups of `model`'s parameters."""
    cls = optimizer_class(name, params)
    given = muon_options(dict(params)) if cls is MuonWithAdamW else dict(params)
    signature = inspect.signature(cls.__init__).parameters
    accepted = {n for n in signature if n not in ("self", "params", "args", "kwargs")}
    fused, fixed = _fused(cls, params, model) or (cls, {})
    taken = inspect.signature(fused.__init__).parameters
    kwargs: dict[str, Any] = {}
    for key, value in given.items():
        if key not in accepted and (key == "adam_w_mode" or key in _IMPLEMENTATION):
            continue
        if key in ("fused", "foreach", "capturable"):
            continue
        if key == "bias_correction" and key not in accepted:
            if value is True:
                continue
            if key not in taken:
                raise ConfigError(
                    f"optimizer.params.bias_correction is {value!r}, and {cls.__name__} always corrects its moments; remove the "
                    "key, or pass an optimizer of your own to initialize(optimizer=...)"
                )
        elif key not in accepted:
            hint = did_you_mean(key, accepted, f"it takes {', '.join(sorted(accepted))}")
            raise ConfigError(f"optimizer.params.{key} is not a parameter of {cls.__name__}; {hint}")
        kwargs[key] = tuple(value) if isinstance(value, list) else value
    if "lr" in accepted and "lr" not in kwargs and signature["lr"].default is inspect.Parameter.empty:
        raise ConfigError(f"optimizer.params.lr is missing; {cls.__name__} has no default learning rate")
    if fused is not cls:
        defaults = {k: v.default for k, v in signature.items() if k in taken and v.default is not inspect.Parameter.empty}
        return ClassFactory(fused, {**defaults, **{k: v for k, v in kwargs.items() if k in taken}, **fixed})
    if "fused" in accepted and cls is not torch.optim.SGD:
        # One pass over the memory. Not SGD's: it rounds an element differently by its place in memory, and the stages
        # would no longer agree to the last bit.
        kwargs["fused"] = True
    return ClassFactory(cls, kwargs, partial(split_groups, model) if cls is MuonWithAdamW else None)


def _fused(
    cls: type[torch.optim.Optimizer], params: Mapping[str, Any], model: nn.Module
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Our class of the same rule as torch's `cls`, and what fixes the rule, if it has all that `params` ask for."""
    if cls not in _FUSED or params.get("torch_adam") or any(p.is_complex() for p in model.parameters()):
        return None
    torchs, ours = (inspect.signature(c.__init__).parameters for c in (cls, _FUSED[cls][0]))
    missing = [k for k in params if k in torchs and k not in ours and k not in _IMPLEMENTATION]
    return _FUSED[cls] if all(params[k] == torchs[k].default for k in missing) else None


class ClassFactory:
    """Builds an optimizer of a known class, `cls`. `prepare` rearranges parameter groups first."""

    def __init__(
        self, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any],
        prepare: Callable[[ParamGroups], ParamGroups] | None = None,
    ) -> None:  # fmt: skip
        self.cls = cls
        self.prepare = prepare
        self._kwargs = kwargs

    def __call__(self, groups: ParamGroups) -> torch.optim.Optimizer:
        kwargs = dict(self._kwargs)
        if any(p.is_complex() for group in groups for p in group["params"]):
            kwargs.pop("fused", None)  # torch has none for complex numbers, and says so only in step
        make: Callable[..., torch.optim.Optimizer] = self.cls
        try:
            return make(groups, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            if "fused" not in str(error) or "fused" not in kwargs:
                raise ConfigError(f"optimizer.params do not fit {self.cls.__name__}: {error}") from error
        kwargs.pop("fused")  # not for these options or this dtype; the result is the same
        return make(groups, **kwargs)
